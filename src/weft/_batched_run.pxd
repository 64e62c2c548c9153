import cython

from weft._batched_call cimport Answer, Arguments, Form, Request
from weft.batching.queue cimport Batch


cdef class Runner:
    cdef public object f, vjp, clock, counters, keeper, listener
    cdef public Arguments arguments
    cdef object _allowed, _on_error, _numbers, _seconds
    cdef bint _zero, _recompute

    @cython.locals(tasks=list, answers=dict)
    cpdef list process(self, Batch batch)


cdef Request _owner(object task)
@cython.locals(kept=list)
cdef list _in_time(list tasks, double now)
@cython.locals(owner=Request, found=list, is_lone=bint)
cdef list _in_order(list tasks, dict answers, double now)
@cython.locals(owner=Request, found=list)
cdef list _arrivals(list tasks)
@cython.locals(owner=Request, parts=list)
cdef list _parts(list tasks)
@cython.locals(owner=Request, bounds=list, start=Py_ssize_t, stop=Py_ssize_t)
cdef tuple _bounds(list tasks)
@cython.locals(answer=Answer, answers=list, i=Py_ssize_t)
cdef list _answers(list rows, object places, object build, object joint, list bounds, object ran)
