import cython

from weft._batched_call cimport Answer, Arguments, Form, Request
from weft.batching.queue cimport Batch


cdef class Result:
    cdef public object output, inputs, size, pull_back
    cdef public list bounds


cdef class Runner:
    cdef public object f, vjp, clock, counters, keeper, listener
    cdef public Arguments arguments
    cdef object _allowed, _on_error, _numbers, _seconds
    cdef bint _zero, _recompute

    @cython.locals(tasks=list, answers=dict)
    cpdef list process(self, Batch batch)
    cdef _run(self, Batch batch, list tasks, dict answers)
    cpdef answer(self, Batch batch, list tasks, Result result, dict answers)
    cpdef Result _call(self, Batch batch, list tasks)
    @cython.locals(first=Request)
    cdef Result _call_here(self, Batch batch, list tasks)
    @cython.locals(form=Form)
    cdef tuple _apply(self, Request first, object inputs, object size)
    @cython.locals(leaves=list)
    cdef list _cut(self, Batch batch, list tasks, Result result)


cdef Request _owner(object task)
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
