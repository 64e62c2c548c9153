import cython

from weft.batching.batch_run cimport Run
from weft.batching.call cimport QueuedCall
from weft.batching.modes cimport has_unkeyed_modes
from weft.batching.processing cimport Processor, answer_all, wake_and_wait
from weft.batching.queue cimport Batch
from weft.batching.scheduler cimport Scheduler
from weft.batching.workers cimport WorkerPool
from weft.core.named cimport Named
from weft.core.scope cimport Scope
from weft.core.ticket cimport Ticket, innermost_call, wake_all, wake_each


cdef class Dispatcher(Named):
    cdef public object limits, clock, is_short, op, name, rules
    cdef public Scheduler scheduler
    cdef public Scope scope
    cdef Processor _processor
    cdef object _idle_waits, _why_closed
    cdef dict _calls, _runs
    cdef WorkerPool _workers
    cdef long _lone_batches
    cdef double _enough_lone_batches
    cdef bint _is_broken, _has_workers

    cdef bint _contains(self, Ticket ticket) except -1
    @cython.locals(run=Run, woken=list, dispatcher=Dispatcher)
    cpdef enter(self, object key, QueuedCall call, double now)
    @cython.locals(joined=Batch, run=Run)
    cdef Run _put(self, object key, QueuedCall call, double now, list woken)
    @cython.locals(batch=Batch, run=Run, scheduler=Scheduler)
    cdef Run _take(self, QueuedCall call, double now, list woken)
    cpdef recheck(self, QueuedCall call)
    cdef _begin_change(self)
    cdef _repair(self)
    cdef Run _new_run(self, Batch batch)
    cdef list _dispatch(self, double now, QueuedCall me)
    cdef list _assign_all(self, Batch batch, double now, QueuedCall me)
    @cython.locals(tasks=list, runner=QueuedCall)
    cdef list _assign(self, Run run, QueuedCall me=*)
    cdef list _wake_next_runner(self, double now)
    cdef list _reset_alarms(self, double now)
    @cython.locals(batch=Batch)
    cpdef run(self, Run run)
    cdef bint _begin(self, Run run) except -1
    cdef list _run_in_worker(self, Batch batch)
    @cython.locals(woken=list)
    cdef _end(self, Run run, list done)
    cdef _release(self, Run run, list done, double now)
    cdef _note_caller(self, QueuedCall call)
    cpdef bint _leave(self, object call) except -1
