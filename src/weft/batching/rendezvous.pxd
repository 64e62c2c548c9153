import cython

from weft.batching.pending cimport Pending, wake_all


cdef class Swept(Pending):
    cpdef wait_until(self, double deadline)


cdef class Fetch(Swept):
    cdef public Pieces meeting
    cdef public object id, dtype


cdef class Pieces:
    cdef public double timeout
    cdef object _mutex
    cdef dict _pieces, _waiting

    @cython.locals(fetch=Fetch, entry=tuple)
    cpdef fetch(self, object scope, object id, object dtype, double now)
    @cython.locals(fetch=Fetch, waiter=Fetch, answers=list, stored=dict)
    cpdef deliver(self, object scope, object id, object dtype, list ids, list pieces, double now)
    @cython.locals(waiting=dict, answers=dict, stored=dict)
    cdef tuple _plan(self, object own_id, object own, list ids, list pieces, double now)
    @cython.locals(entry=tuple)
    cdef object _live(self, object id, double now)
    cpdef expire(self, Fetch fetch)
    cpdef leave(self, Fetch fetch)


cdef class Gather(Swept):
    cdef public Gradients meeting
    cdef public object id, rows, grad
    cdef public set missing


cdef class Gradients:
    cdef object _mutex
    cdef dict _sent, _owners

    cpdef expire(self, Gather owner)
    cpdef leave(self, Gather owner)
