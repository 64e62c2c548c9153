cpdef new()
cdef long long _mark(long long upper) except? -1
cpdef bint is_empty(long long id) except? -1
