cpdef new()
cpdef bint is_empty(long long id) except? -1
