import cython

from weft.batching.dispatcher cimport QueuedCall, Dispatcher


cdef class Plan:
    cdef public object op, container, name, given, queue, numpy_key
    cdef dict __dict__

    cpdef key(self, object x, object library)
    cpdef lane(self, object library)


cdef class remembered:
    cdef object _plan, _kept


cdef class Queue(Dispatcher):
    cdef public object given


cpdef tuple tensors(object in_tensors)
cpdef Queue queue_of(Plan plan, object key, object scope, object make, long rows, bint low=*)
cpdef enter(QueuedCall call, object lane)
