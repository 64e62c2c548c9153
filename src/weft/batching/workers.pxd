cdef class WorkerPool:
    cdef object _clock, _name, _jobs, __weakref__
    cdef public long most
    cdef double _idle_seconds
    cdef dict _current
    cdef list _sleeping
    cdef set _threads
    cdef bint _is_closed

    cpdef list give(self, object job)
    cpdef list replace_dead(self)
    cpdef next(self, object me)
    cdef _take(self, object me)
    cpdef list close(self)
