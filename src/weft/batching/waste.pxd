import cython

from weft.batching.queue cimport Batch, Queue
from weft.batching.scheduler cimport Scheduler


cdef class Filling:
    cdef public object cost
    cdef object _rows
    cdef list _longest, _sums

    cpdef add(self, object task)


cpdef list choose(list tasks, object target, double max_waste)


cdef class WasteScheduler(Scheduler):
    cdef double _max_waste

    @cython.locals(batch=Batch)
    cdef bint _joins_taken(self, Queue queue, object task) except -1
    cdef _put_whole(self, Queue queue, object task, double now)
    cdef _put_split(self, Queue queue, object task, double now)
    @cython.locals(batch=Batch)
    cdef Batch _ready(self, Queue queue, double now)
    cdef _leave(self, Queue queue, Batch batch, list chosen)
    cdef _append_again(self, Queue queue, list tasks)
