import cython

from weft.batching.call cimport QueuedCall
from weft.batching.dispatcher cimport Dispatcher
from weft.batching.queue cimport Batch


cdef class ArgumentSpec:
    cdef public object structure, statics, kinds, mode, key, like
    cdef public bint pulls, wants_gradient
    cdef object __weakref__


cdef class BatchSummary:
    cdef public object number, reason, rows, padding
    cdef public double started, ended


cdef class BatchOutput:
    cdef public list columns
    cdef public object places, build


cdef class Answer:
    cdef public BatchOutput output
    cdef public BatchSummary ran
    cdef public object held
    cdef public Py_ssize_t at, position

    cdef _fill(self, BatchOutput output, Py_ssize_t at, Py_ssize_t position, object held, BatchSummary ran)
    cpdef list leaves(self)
    @cython.locals(output=BatchOutput)
    cpdef result(self)


cdef class Request(QueuedCall):
    cdef public ArgumentSpec form
    cdef public object arrays, count, shared, counters, backward, origin, name
    cdef public bint examples, is_attached, is_late, is_traced

    cdef _open(self, Dispatcher dispatcher, ArgumentSpec form, object arrays, object count, dict shared, object cost)
    cpdef bint answer(self, object task, object value) except -1
    cpdef fail(self)
    cpdef part(self, object start, object rows)
    @cython.locals(only=Answer)
    cpdef result(self)


cdef class Arguments:
    cdef public object tells, shared
    cdef public object _forms
    cdef object _parameters, _key, _cost
    cdef bint _rows, _is_plain
    cdef ArgumentSpec _last

    @cython.locals(found=ArgumentSpec, request=Request)
    cpdef Request take(self, Dispatcher dispatcher, tuple args, dict kwargs, bint pulls)
    cpdef call(self, object f, ArgumentSpec form, object arrays, dict shared, object count)
    @cython.locals(form=ArgumentSpec)
    cdef ArgumentSpec _plain(self, object x, bint pulls)


cpdef mode_here()
