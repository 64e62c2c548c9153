import cython

from weft.batching.arguments cimport Arguments
from weft.batching.dispatcher cimport Dispatcher
from weft.batching.request cimport BatchKey, CallContext, Request


cdef class Submitter:
    cdef public object name, _scope, _counters, _outstanding, _policy, _deadline, _recording, _replay_timeout
    cdef public Dispatcher _dispatcher
    cdef public Arguments _arguments
    cdef public CallContext _plain, _plain_task
    cdef public bint _has_vjp, _on_loop, _closed

    cpdef Request _request(self, tuple args, dict kwargs, CallContext context, bint is_vjp=*)
    @cython.locals(key=BatchKey)
    cpdef Request _submit(self, Request request)
    cpdef _answer(self, Request request)
