import cython

from weft.batching.queue cimport Queue


cdef class Turns:
    cdef public Queue first
    cdef Queue _last
    cdef list _times
    cdef long _most

    @cython.locals(last=Queue)
    cpdef enlist(self, Queue queue)
    @cython.locals(queue=Queue)
    cpdef unlist_first(self)
    cpdef watch(self, Queue queue, double when)
    cpdef Queue next_due(self, double now)
