import cython

from weft.batching.request cimport Arguments, Form, Request
from weft.core.clock cimport time_by
from weft.batching.dispatcher cimport Desk


cdef class Entrance:
    cdef public object name, _scope, _counters, _outstanding, _backward, _deadline, _names, _patience
    cdef public Desk _desk
    cdef public Arguments _arguments
    cdef public bint _examples, _closed

    cpdef Request _take(self, tuple args, dict kwargs, bint pulls=*)
    @cython.locals(desk=Desk, form=Form, now=double)
    cpdef Request _enter(
        self, Request request, object deadline=*, object priority=*, object caller=*, object origin=*
    )
