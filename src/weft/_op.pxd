from weft._arrays cimport dtype_of, library_of, over_memory

cdef class Op:
    cdef public object name, function, signature, result, pull, kernel
    cdef public tuple inputs, outputs, wants
    cdef public bint recorded, meets
    cdef dict __dict__

    cpdef begin(self, tuple args, dict kwargs)
    cpdef adapter(self, tuple args, dict kwargs)
    cpdef run(self, args, dict kwargs)


cpdef _adapter(values)
