cdef class Scope:
    cdef public object clock, now, observers
    cdef public dict resources
    cdef public double next_expiry
    cdef public object _warned
    cdef object __weakref__

    cpdef expires(self, double when)
    cpdef double arrive(self) except? -1


cpdef Scope current()
