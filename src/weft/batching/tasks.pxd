import cython

from weft.core.ticket cimport Ticket, wake_each


cdef class TaskWaiter:
    cdef public object loop
    cdef public bint _asyncio_future_blocking
    cdef bint _is_attached, _is_started
    cdef Ticket _ticket
    cdef object _resume, _context, _timer, _cancelled

    cdef bint _must_sleep(self, Ticket ticket) except -1
    cdef _give_up(self, Ticket ticket)
    cdef _check_alarm(self, Ticket ticket)
    cdef _set_timer(self, Ticket ticket)
    cdef _do_job(self, Ticket ticket)
    cpdef wake(self, object future=*)


cdef class CallbackWaiter(TaskWaiter):
    cdef object _callback

    cpdef wake(self, object future=*)


cdef class LoopInbox:
    cdef object _waiters
    cdef bint _is_called
    cdef dict _sweeps, _turns

    cpdef post(self, list waiters)
    cpdef post_turn(self, object turn)
    cdef _call(self, object loop)
    cdef _run_turns(self)
    cdef list _take(self)
    @cython.locals(waiters=list, running=RunningLoop, waiter=TaskWaiter)
    cpdef _deliver(self)
    @cython.locals(planned=tuple)
    cpdef sweep_by(self, object scope, double when)


cdef class RunningLoop:
    cdef readonly unsigned long ident
    cdef readonly object loop


cdef RunningLoop _delivering


@cython.locals(found=RunningLoop)
cpdef RunningLoop running_loop()
@cython.locals(found=LoopInbox)
cpdef LoopInbox inbox_of(object loop)
