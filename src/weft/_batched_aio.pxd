cdef class AsyncCalls:
    cdef object _batcher, _ask
    cdef tuple _first
