import cython

from weft.batching.queue cimport Queue
from weft.batching.turns cimport Turns


cdef class QueueTable:
    cdef public object limits, target, enough, waiting_rows
    cdef public long waiting, running
    cdef public dict queues
    cdef public list moved
    cdef object _most, _most_waiting, _low
    cdef double _timeout
    cdef long _threads, _most_queues
    cdef bint _is_plain, _is_merging
    cdef Turns _turns

    cdef _watch(self, Queue queue)
    cdef bint _is_ready(self, Queue queue) except -1
    cdef double _due_of(self, Queue queue) except? -1
    @cython.locals(queue=Queue)
    cdef _list_due(self, double now)
    @cython.locals(queue=Queue, turns=Turns)
    cpdef list ready(self, double now)
