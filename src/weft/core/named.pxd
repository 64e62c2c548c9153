cdef class Named:
    cdef public object resources, key
    cdef public double last_used
    cdef public bint is_dropped

    cpdef in_use(self)
    cpdef bint is_empty(self) except -1
    cpdef drop(self, double now)
