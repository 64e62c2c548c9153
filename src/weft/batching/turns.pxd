from weft.batching.queue cimport Queue


cdef class Turns:
    cdef public object listed
    cdef list _times
    cdef long _most

    cpdef enlist(self, Queue queue)
    cpdef Queue unlist_first(self)
    cpdef watch(self, Queue queue, double when)
    cpdef Queue next_due(self, double now)
