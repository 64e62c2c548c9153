import cython

from weft.batching.house cimport House
from weft.batching.pending cimport Pending, has_threads, wake, wake_all
from weft.batching.queue cimport Batch, Queue, Scheduler


cdef double BACKSTOP


cdef class Call(Pending):
    cdef public Desk desk
    cdef public object rows, start, payload, batch, queue, slices, answers
    cdef public double arrived, deadline
    cdef public bint low, gone, is_task

    cpdef _enlist(self, Desk desk, object rows, object payload)
    cpdef bint answer(self, object task, object value) except -1


cdef class Run:
    cdef public Batch batch
    cdef public bint begun
    cdef public Desk desk
    cdef public Call runner

    cpdef run(self)


cdef class _Look:
    cdef Desk _desk
    cdef Call _call


cdef class Desk:
    cdef public object limits, scope, clock, process, is_short, op, name, rules, target
    cdef public Scheduler scheduler
    cdef object _mutex, _idle, _why_closed
    cdef set _inside
    cdef House _house
    cdef long _alone

    @cython.locals(batch=Batch, run=Run, joined=Batch, scheduler=Scheduler)
    cpdef enter(self, object key, Call call, double now)
    cpdef look(self, Call call)
    cdef list _dispatch(self, double now, Call me)
    cdef list _give_out(self, Batch batch, double now, Call me)
    @cython.locals(tasks=list, runner=Call)
    cdef list _hand_on(self, Run run, Call me=*)
    cdef list _moved(self, double now)
    @cython.locals(batch=Batch)
    cdef _set_alarm(self, Call call, double now)
    @cython.locals(batch=Batch)
    cpdef run(self, Run run)
    cdef tuple _process(self, Batch batch)
    @cython.locals(owner=Call, i=Py_ssize_t)
    cdef list _answer(self, Batch batch, list answers)
    cdef _end(self, Batch batch)
    cdef _see_off(self, list done)
    cdef list _next_up(self, double now)
