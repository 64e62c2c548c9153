import cython

from weft.batching.workers cimport WorkerPool
from weft.core.named cimport Named
from weft.core.scope cimport Scope
from weft.batching.queue cimport Batch, Queue, Scheduler
from weft.core.ticket cimport Ticket, has_threads, held_here, wake_all


cdef double BACKSTOP


cdef class QueuedCall(Ticket):
    cdef public object rows, start, payload, batch, queue, slices, answers
    cdef public double arrived, deadline
    cdef public bint low, gone, is_task

    cdef _init_call(self, Dispatcher dispatcher, object rows, object payload)
    cpdef bint answer(self, object task, object value) except -1


cdef class Run:
    cdef public Batch batch
    cdef public bint is_begun, is_given
    cdef public Dispatcher dispatcher
    cdef public QueuedCall runner
    cdef public object done, problem

    cpdef run(self)


cdef class _Look:
    cdef Dispatcher _dispatcher
    cdef QueuedCall _call


cdef class Dispatcher(Named):
    cdef public object limits, clock, process, is_short, op, name, rules, target
    cdef public Scheduler scheduler
    cdef public Scope scope
    cdef object _idle, _why_closed
    cdef dict _calls, _runs
    cdef WorkerPool _workers
    cdef long _alone
    cdef bint _is_broken, _has_workers

    cdef bint _is_held(self, Ticket ticket) except -1
    @cython.locals(run=Run, woken=list, dispatcher=Dispatcher)
    cpdef enter(self, object key, QueuedCall call, double now)
    @cython.locals(joined=Batch, scheduler=Scheduler, run=Run)
    cdef Run _put(self, object key, QueuedCall call, double now, list woken)
    @cython.locals(batch=Batch, run=Run, scheduler=Scheduler)
    cdef Run _take(self, QueuedCall call, double now, list woken)
    cpdef look(self, QueuedCall call)
    cdef Run _new_run(self, Batch batch)
    cdef list _dispatch(self, double now, QueuedCall me)
    cdef list _give_out(self, Batch batch, double now, QueuedCall me)
    @cython.locals(tasks=list, runner=QueuedCall)
    cdef list _hand_on(self, Run run, QueuedCall me=*)
    cdef list _moved(self, double now)
    @cython.locals(batch=Batch)
    cdef _set_alarm(self, QueuedCall call, double now)
    @cython.locals(batch=Batch)
    cpdef run(self, Run run)
    cdef bint _begin(self, Run run) except -1
    cdef tuple _process_here(self, Batch batch)
    cdef tuple _process(self, Batch batch)
    @cython.locals(owner=QueuedCall, i=Py_ssize_t)
    cdef list _answer(self, Batch batch, list answers)
    @cython.locals(woken=list)
    cdef _end(self, Run run, list done)
    cdef _release(self, Run run, list done, double now)
    cdef _see_off(self, list done)
    cdef list _next_up(self, double now)
