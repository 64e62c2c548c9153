import cython

from weft.batching.pending cimport Pending


cdef class Wait:
    cdef public object loop
    cdef public bint _asyncio_future_blocking
    cdef bint _is_attached
    cdef Pending _pending
    cdef object _go_on, _context, _timer, _cancelled

    cdef _open(self, Pending pending, object loop)
    cdef bint _sleeps(self, Pending pending) except -1
    cdef _leave(self, Pending pending)
    cdef _look(self, Pending pending)
    cdef _set_alarm(self, Pending pending)
    cdef _work(self, Pending pending)
    cpdef wake(self, object future=*)


cdef class Inbox:
    cdef public object loop
    cdef list _waits
    cdef object _lock
    cdef bint _is_called
    cdef dict _sweeps

    cpdef post(self, list waits)
    cdef list _take(self)
    @cython.locals(waits=list, spot=Spot)
    cpdef _deliver(self)
    @cython.locals(planned=tuple)
    cpdef sweep_by(self, object scope, double when)


cdef class Spot:
    cdef readonly unsigned long ident
    cdef readonly object loop, thread


cdef Spot _spot


@cython.locals(found=Spot)
cpdef Spot here()
@cython.locals(wait=Wait)
cpdef Wait done(Pending pending, object loop=*)
@cython.locals(found=Inbox)
cpdef Inbox inbox_of(object loop)
@cython.locals(wait=Wait)
cpdef _wake(list waits)
@cython.locals(wait=Wait)
cdef _let_go_on(list waits, object future)
