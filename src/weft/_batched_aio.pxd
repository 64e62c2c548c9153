from weft._batched_entry cimport Entrance
from weft.batching.aio cimport done


cdef class AsyncCalls:
    cdef Entrance _batcher
    cdef tuple _first
