import cython


cdef class MonotonicClock:
    cpdef double now(self) except? -1
    cpdef bint acquire(self, object lock, double until) except -1


@cython.locals(own=MonotonicClock)
cpdef double time_by(object clock) except? -1
