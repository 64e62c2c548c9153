from weft.batching.call cimport QueuedCall
from weft.batching.queue cimport Batch


cdef class Run:
    cdef public Batch batch
    cdef public bint is_begun, is_assigned, is_on_loop
    cdef public QueuedCall runner
    cdef public object dispatcher, done, problem

    cpdef run(self)
