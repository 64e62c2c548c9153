import cython

from weft.core.named cimport Named
from weft.core.ticket cimport Ticket, wake_all


cdef class ExpiringTicket(Ticket):
    cpdef wait_until(self, double deadline)


cdef class Fetch(ExpiringTicket):
    cdef public PieceTable table
    cdef public object id, dtype
    cdef public double now

    cpdef take(self, object piece)


cdef class PieceTable(Named):
    cdef public double timeout
    cdef dict _pieces, _waiting
    cdef tuple _delivery

    @cython.locals(table=PieceTable)
    cpdef fetch(self, Fetch fetch)
    cdef _fetch(self, Fetch fetch, object id, double now)
    @cython.locals(other=Fetch)
    cdef _check_not_awaited(self, object id)
    @cython.locals(answers=list, table=PieceTable)
    cpdef deliver(self, object scope, object id, object dtype, list ids, list pieces, double now)
    @cython.locals(answers=list, stored=dict)
    cdef tuple _deliver(self, object scope, object id, object dtype, list ids, list pieces, double now)
    @cython.locals(waiter=Fetch, stored=dict, answers=list)
    cdef _repair(self)
    @cython.locals(waiting=dict, answers=dict, stored=dict)
    cdef tuple _decide(self, object own_id, object own, list ids, list pieces, double now)
    @cython.locals(entry=tuple)
    cdef object _live(self, object id, double now)
    cdef bint _expire(self, Fetch fetch, double now) except -1
    cpdef recheck(self, Fetch fetch)
    cpdef list forget(self, Fetch fetch)


cdef class Gather(ExpiringTicket):
    cdef public GradientTable table
    cdef public object id, rows, grad
    cdef public set missing
    cdef public double now, until


cdef class GradientTable(Named):
    cdef dict _sent, _owners, _wanted
    cdef bint _is_broken

    cpdef recheck(self, Gather owner)
    cpdef list forget(self, Gather owner)
