import cython

from weft.batching.arguments cimport Arguments
from weft.batching.batch_arrays cimport split_rows
from weft.batching.modes cimport jax_mode, torch_mode
from weft.batching.request cimport BatchKey, BatchResult, CallResult, Request
from weft.batching.queue cimport Batch


cdef class FunctionOutput:
    cdef public object output, inputs, size, pull_back, layout, stream
    cdef public list offsets


cdef class Runner:
    cdef public object clock, counters, registry, recording, options, why_closed
    cdef Arguments _arguments
    cdef object _context, _f, _vjp, _numbers

    @cython.locals(tasks=list, ran=list, answers=list, refused=dict, ended=double)
    cpdef list process(self, Batch batch)
    cpdef FunctionOutput _call(self, Batch batch, list tasks)
    @cython.locals(offsets=list, first=Request, key=BatchKey)
    cpdef FunctionOutput _call_here(self, Batch batch, list tasks)
    cdef list _concat(self, list tasks, BatchKey key, object rows, object size, object layout)
    cpdef list _results(self, Batch batch, list tasks, FunctionOutput output)
    @cython.locals(offsets=list, result=BatchResult, i=Py_ssize_t)
    cpdef list _split(self, Batch batch, list tasks, FunctionOutput output)


cdef Request _owner(object task)
cdef list _in_time(list tasks, double now)
@cython.locals(owner=Request, is_lone=bint, i=Py_ssize_t)
cdef _reject_late(list tasks, list answers, double now)
@cython.locals(owner=Request, found=list)
cdef list _arrivals(list tasks)
@cython.locals(owner=Request, parts=list)
cdef list _parts(list tasks)
@cython.locals(owner=Request, offsets=list, start=Py_ssize_t)
cdef list _offsets(list tasks)
cdef list _concat_rows(BatchKey key, list parts, object rows, object size, object layout)
