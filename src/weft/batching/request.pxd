import cython

from weft.batching.dispatcher cimport Call, Desk
from weft.batching.queue cimport Batch


cdef class Form:
    cdef public object structure, statics, kinds, mode, key, like
    cdef public bint pulls, wants_gradient
    cdef object __weakref__


cdef class Ran:
    cdef public object number, reason, rows, padding
    cdef public double started, ended


cdef class Output:
    cdef public list columns
    cdef public object places, build


cdef class Answer:
    cdef public Output output
    cdef public Ran ran
    cdef public object held
    cdef public Py_ssize_t at, position

    cdef _fill(self, Output output, Py_ssize_t at, Py_ssize_t position, object held, Ran ran)
    cpdef list leaves(self)
    @cython.locals(output=Output)
    cpdef result(self)


cdef class Request(Call):
    cdef public Form form
    cdef public object arrays, count, shared, counters, backward, origin, name
    cdef public bint examples, is_attached, is_late, is_traced

    cdef _open(self, Desk desk, Form form, object arrays, object count, dict shared, object cost)
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
    cdef Form _last

    @cython.locals(found=Form, request=Request)
    cpdef Request take(self, Desk desk, tuple args, dict kwargs, bint pulls)
    cpdef call(self, object f, Form form, object arrays, dict shared, object count)
    @cython.locals(form=Form)
    cdef Form _plain(self, object x, bint pulls)


cpdef mode_here()
