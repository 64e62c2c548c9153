from weft.core.arrays cimport dtype_of, library_of

cdef class _Layout:
    cdef public object library, dtype, vector_dtype, axis, shape, is_moved, x, mask, channels, count, threads, plan, held

    cdef _memory(self, x)
    cdef _numpy(self, x)
    cdef _flat(self, array)
    cpdef like(self, x)
    cpdef empty(self)
    cpdef result(self, flat)
    cpdef vector(self, v)
    cpdef new_vector(self)
    cpdef give(self, vector)

cdef _plain(x)
