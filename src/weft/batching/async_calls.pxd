from weft.batching.submit cimport Submitter
from weft.batching.tasks cimport RunningLoop, done, running_loop


cdef class AsyncCalls:
    cdef Submitter _batcher
    cdef tuple _first
