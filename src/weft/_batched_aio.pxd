from weft._batched_entry cimport Entrance


cdef class AsyncCalls:
    cdef Entrance _batcher
    cdef tuple _first
