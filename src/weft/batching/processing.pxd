import cython

from weft.batching.call cimport QueuedCall
from weft.batching.queue cimport Batch
from weft.core.scope cimport Scope
from weft.core.ticket cimport has_threads, wake_all


cdef class Processor:
    cdef public object process, op, name, batcher
    cdef public Scope scope

    cpdef list run(self, Batch batch)


@cython.locals(owner=QueuedCall, i=Py_ssize_t)
cpdef list answer_all(Batch batch, list answers)
cpdef wake_and_wait(list done, object clock)
