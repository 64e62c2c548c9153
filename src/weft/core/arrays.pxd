cpdef library_of(x)
cpdef dtype_of(x)
