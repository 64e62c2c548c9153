import cython

from weft.batching.pending cimport Pending, wake, wake_all
from weft.batching.queue cimport Batch, Queue, Scheduler, Task


cdef class Call(Pending):
    cdef public Desk desk
    cdef public long rows, start
    cdef public object payload
    cdef public double arrived
    cdef public Batch batch
    cdef public Queue queue
    cdef public bint low, gone
    cdef public list slices
    cdef public dict answers

    cpdef _enlist(self, Desk desk, long rows, object payload)
    cpdef bint answer(self, object task, object value) except -1


cdef class Run:
    cdef public Batch batch
    cdef public bint begun
    cdef public Desk desk
    cdef public Call runner

    cpdef run(self)


cdef class Desk:
    cdef public object limits, scope, clock, process, is_short, op, name
    cdef public long target
    cdef public Scheduler scheduler
    cdef object _mutex, _inside

    @cython.locals(scheduler=Scheduler, batch=Batch, run=Run)
    cpdef enter(self, object key, Call call, double now)
    cpdef look(self, Call call)
    cpdef leave(self, Call call)
    cdef list _dispatch(self, double now, Call me)
    cdef list _give_out(self, Batch batch, double now, Call me)
    cdef list _moved(self, double now)
    cdef _set_alarm(self, Call call, double now)
    @cython.locals(batch=Batch)
    cpdef run(self, Run run)
    cdef tuple _process(self, Batch batch)
    cdef _end(self, Batch batch)
