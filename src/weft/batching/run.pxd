import cython

from weft.batching.request cimport Answer, Arguments, ArgumentSpec, BatchOutput, BatchSummary, Request, mode_here
from weft.batching.queue cimport Batch


cdef class Result:
    cdef public object output, inputs, size, pull_back
    cdef public list edges


cdef class Runner:
    cdef public object f, vjp, clock, counters, keeper, listener
    cdef public Arguments arguments
    cdef object _allowed, _on_error, _numbers, _seconds
    cdef bint _zero, _recompute

    @cython.locals(tasks=list, ran=list, found=list, refused=dict, ended=double)
    cpdef list process(self, Batch batch)
    cdef list _run(self, Batch batch, list tasks)
    cpdef list answers(self, Batch batch, list tasks, Result result)
    cpdef Result _call(self, Batch batch, list tasks)
    @cython.locals(edges=list, first=Request)
    cdef Result _call_here(self, Batch batch, list tasks)
    cdef list _join_whole(self, list tasks, ArgumentSpec form, object size, object padded)
    @cython.locals(form=ArgumentSpec)
    cdef _apply(self, Request first, object inputs, object size)
    @cython.locals(leaves=list, edges=list, output=BatchOutput)
    cdef list _cut(self, Batch batch, list tasks, Result result)


cdef Request _owner(object task)
cdef list _copies(object error, list tasks)
cdef list _in_time(list tasks, double now)
@cython.locals(owner=Request, is_lone=bint, i=Py_ssize_t)
cdef _tell_late(list tasks, list answers, double now)
@cython.locals(owner=Request, found=list)
cdef list _arrivals(list tasks)
@cython.locals(owner=Request, parts=list)
cdef list _parts(list tasks)
@cython.locals(owner=Request, edges=list, start=Py_ssize_t)
cdef list _edges(list tasks)
@cython.locals(answer=Answer, answers=list, i=Py_ssize_t)
cdef list _answers(BatchOutput output, list edges, object joint, BatchSummary ran)
cdef _column(object x, list edges)
cdef _check_rows(object x, object i, object size)
