import cython

from weft.batching.queue cimport Batch, Queue
from weft.batching.scheduler cimport Scheduler


cdef class Filling:
    cdef public object cost
    cdef object _rows
    cdef list _longest, _sums

    cpdef add(self, object task)
    cpdef double waste_with(self, object task)


cdef double _most_waste(object rows, list sums, list longest)


cpdef list choose(list tasks, object target, double max_waste)


cdef class WasteScheduler(Scheduler):
    cdef double _max_waste

    @cython.locals(batch=Batch)
    cdef bint _joins_taken(self, Queue queue, object task) except -1
    cdef _put_whole(self, Queue queue, object task, double now)
    cdef _put_split(self, Queue queue, object task, double now)
    @cython.locals(page=Batch)
    cdef double _due_of(self, Queue queue) except? -1
    @cython.locals(batch=Batch, page=Batch)
    cdef Batch _ready(self, Queue queue, double now)
    cdef Batch _leave(self, Queue queue, Batch page, list chosen)
