cdef class Op:
    cdef public object name, function, signature, result, pull
    cdef public tuple inputs, outputs, wants
    cdef public bint recorded, meets
    cdef dict __dict__

    cpdef begin(self, tuple args, dict kwargs)
    cpdef adapter(self, tuple args, dict kwargs)
