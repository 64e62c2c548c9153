import cython

from weft.batching.request cimport Arguments, ArgumentSpec, Request
from weft.batching.dispatcher cimport Dispatcher


cdef class Submitter:
    cdef public object name, _scope, _counters, _outstanding, _backward, _deadline, _names, _patience
    cdef public Dispatcher _dispatcher
    cdef public Arguments _arguments
    cdef public bint _examples, _closed

    cpdef Request _take(self, tuple args, dict kwargs, bint pulls=*)
    @cython.locals(dispatcher=Dispatcher, form=ArgumentSpec, now=double)
    cpdef Request _enter(
        self, Request request, object deadline=*, object priority=*, object caller=*, object origin=*
    )
