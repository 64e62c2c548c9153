from weft.batching.submit cimport Submitter
from weft.batching.tasks cimport TaskWaiter


cdef class AsyncCalls:
    cdef Submitter _batcher
    cdef tuple _first
