import cython

from weft.batching.pending cimport Pending


cdef class Wait:
    cdef public object loop
    cdef public bint _asyncio_future_blocking
    cdef Pending _pending
    cdef object _go_on, _context, _timer, _cancelled

    cdef _leave(self, Pending pending)
    cdef _look(self, Pending pending)
    cdef _set_alarm(self, Pending pending)
    cdef _work(self, Pending pending)
    cpdef wake(self)


@cython.locals(wait=Wait)
cpdef _wake(list waits)
@cython.locals(wait=Wait)
cdef _let_go_on(object waits, Py_ssize_t count)
