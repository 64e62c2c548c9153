cdef class Named:
    cdef public object home, key
    cdef public double used
    cdef public bint is_dropped

    cpdef here(self)
    cpdef bint is_empty(self) except -1
    cpdef drop(self, double now)
