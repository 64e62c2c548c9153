from weft.core.arrays cimport dtype_of, library_of, over_memory

cdef class Op:
    cdef public object name, function, signature, result, pull, kernel
    cdef public tuple inputs, outputs, wants, places, kept, asked, still, _names, _takes
    cdef public Py_ssize_t _first, _end
    cdef public bint recorded, meets
    cdef public dict _defaults
    cdef dict __dict__

    cpdef begin(self, tuple args, dict kwargs)
    cpdef answer(self, args, dict kwargs)
    cpdef take(self, tuple args, dict kwargs)
    cpdef adapter(self, tuple args, dict kwargs)
    cpdef run(self, args, dict kwargs)
    cpdef bind(self, args, dict kwargs)
    cdef list _values(self, args, dict kwargs)
    cdef _over_memory(self, args, dict kwargs)
    cdef bint _are_tensors(self, tuple args)


cdef class Call:
    cdef public Op op
    cdef public list values
    cdef public tuple sizes, output_sizes, kept_sizes, outputs

    cpdef run(self, inputs)
    cpdef flat(self, result)
    cpdef pack(self, outputs)
    cpdef keep(self, inputs, outputs)
    cpdef pull_back(self, grads, kept)
    cpdef gradients(self, grads, kept)


cpdef _adapter(values)
cdef _flatten(values)
cdef _unflatten(flat, sizes)
