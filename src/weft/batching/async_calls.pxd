from weft.batching.submit cimport Entrance
from weft.batching.tasks cimport Spot, done, here


cdef class AsyncCalls:
    cdef Entrance _batcher
    cdef tuple _first
