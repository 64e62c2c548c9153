cdef class _Clocked:
    cdef public long count
    cdef public double total, longest
    cdef public list buckets

    cpdef add(self, double seconds)
