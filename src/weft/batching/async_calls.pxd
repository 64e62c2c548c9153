from weft.batching.submit cimport Submitter
from weft.batching.tasks cimport done


cdef class AsyncCalls:
    cdef Submitter _batcher
    cdef tuple _first
