cdef class House:
    cdef object _clock, _name, _jobs, _mutex, __weakref__
    cdef long _most
    cdef double _patience
    cdef list _sleeping
    cdef set _threads
    cdef bint _is_closed

    cpdef bint give(self, object job) except -1
    cdef bint _start(self, object job) except -1
    cpdef next(self)
    cpdef list close(self)
