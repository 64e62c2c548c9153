import cython

from weft.batching.call cimport QueuedCall
from weft.batching.dispatcher cimport Dispatcher
from weft.batching.queue cimport Batch


cdef class BatchKey:
    cdef public object structure, exact, array_keys, torch_mode, jax_mode, statics, like
    cdef public bint is_on_host, is_vjp, grad_enabled, has_backward, has_rows
    cdef object __weakref__


cdef class BatchResult:
    cdef public object number, reason, padding, ragged, array_places, item_places, build, stream
    cdef public double started, ended
    cdef public list offsets, parts


cdef class CallResult:
    cdef public BatchResult batch
    cdef public Py_ssize_t index
    cdef public object handle

    cpdef list leaves(self)
    @cython.locals(batch=BatchResult)
    cpdef build(self)


cdef class CallContext:
    cdef public Dispatcher dispatcher
    cdef public object counters, policy, caller, low
    cdef public double seconds
    cdef public bint is_task


cdef class Request(QueuedCall):
    cdef public CallContext context
    cdef public BatchKey key
    cdef public object arrays, call_arrays, count, items, lengths, shared, caller_thread, name, split_receipt, stream, feed
    cdef public bint is_late, is_traced

    cpdef bint answer(self, object task, object value) except -1
    cpdef fail(self)
    cpdef part(self, object start, object rows)
    @cython.locals(only=CallResult)
    cpdef result(self)
