import cython

from weft.core.ticket cimport Ticket


cdef class TaskWaiter:
    cdef public object loop
    cdef public bint _asyncio_future_blocking
    cdef bint _is_attached, _is_started
    cdef Ticket _ticket
    cdef object _go_on, _context, _timer, _cancelled

    cdef bint _sleeps(self, Ticket ticket) except -1
    cdef _leave(self, Ticket ticket)
    cdef _look(self, Ticket ticket)
    cdef _set_alarm(self, Ticket ticket)
    cdef _work(self, Ticket ticket)
    cpdef wake(self, object future=*)


cdef class LoopInbox:
    cdef public object loop
    cdef object _waits
    cdef bint _is_called
    cdef dict _sweeps

    cpdef post(self, list waits)
    cdef list _take(self)
    @cython.locals(waits=list, spot=RunningLoop)
    cpdef _deliver(self)
    @cython.locals(planned=tuple)
    cpdef sweep_by(self, object scope, double when)


cdef class RunningLoop:
    cdef readonly unsigned long ident
    cdef readonly object loop, thread


cdef RunningLoop _spot


@cython.locals(found=RunningLoop)
cpdef RunningLoop here()
cpdef TaskWaiter done(Ticket ticket, object loop=*)
@cython.locals(found=LoopInbox)
cpdef LoopInbox inbox_of(object loop)
@cython.locals(wait=TaskWaiter)
cdef _let_go_on(list waits, object future)
