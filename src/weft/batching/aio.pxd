import cython

from weft.batching.pending cimport Pending


cdef class Wait:
    cdef public object loop
    cdef public bint _asyncio_future_blocking
    cdef Pending _pending
    cdef object _go_on, _context, _timer, _cancelled

    cdef _open(self, Pending pending)
    cdef bint _sleeps(self, Pending pending) except -1
    cdef _leave(self, Pending pending)
    cdef _look(self, Pending pending)
    cdef _set_alarm(self, Pending pending)
    cdef _work(self, Pending pending)
    cpdef wake(self, object future=*)


cdef class Inbox:
    cdef public object loop
    cdef public object _waits
    cdef object _lock
    cdef bint _is_called
    cdef dict _sweeps

    cpdef post(self, list waits)
    cdef _call(self, object loop)
    @cython.locals(planned=tuple)
    cpdef sweep_by(self, object scope, double when)


@cython.locals(wait=Wait)
cpdef Wait done(Pending pending)
@cython.locals(found=Inbox)
cpdef Inbox inbox_of(object loop)
@cython.locals(wait=Wait)
cpdef _wake(list waits)
@cython.locals(wait=Wait)
cdef _let_go_on(object waits, Py_ssize_t count, object future)
