import cython

from weft.batching.queue cimport Batch
from weft.batching.scheduler cimport Scheduler
from weft.core.ticket cimport Ticket


cdef class QueuedCall(Ticket):
    cdef public object rows, start, payload, batch, queue, parts, answers, spans, loop
    cdef public double arrived, deadline
    cdef public bint low, has_departed, is_task, is_alone, stays_here

    cdef _init_call(self, object dispatcher, object rows, object payload)
    cpdef bint answer(self, object task, object value) except -1
    @cython.locals(batch=Batch)
    cpdef set_alarm(self, Scheduler scheduler, double now)
