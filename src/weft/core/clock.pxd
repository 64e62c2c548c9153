cdef class MonotonicClock:
    cpdef double now(self) except? -1
    cpdef bint acquire(self, object lock, double until) except -1
