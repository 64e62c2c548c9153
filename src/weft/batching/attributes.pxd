import cython

from weft.batching.call cimport QueuedCall
from weft.batching.dispatcher cimport Dispatcher
from weft.core.scope cimport Scope


cdef class SpecCache:
    cdef object _make, _cached
    cdef tuple _last


@cython.locals(i=Py_ssize_t)
cdef bint _are_same(tuple a, tuple b) except -1


cdef class OpDispatcher(Dispatcher):
    cdef public object attributes


cdef class ResourceSpec:
    cdef public object op, container, name, attributes, queue, numpy_key
    cdef dict __dict__

    cpdef key(self, object x, object library)
    cpdef queue_key(self, object library)
    @cython.locals(found=OpDispatcher)
    cpdef OpDispatcher dispatcher(self, object key, Scope scope, object make, long rows, bint low=*)


cdef class OpCall(QueuedCall):
    cdef public object queue_key

    @cython.locals(dispatcher=Dispatcher)
    cpdef enter(self)
