from weft.core.arrays cimport library_of

cdef class Op:
    cdef public object name, function, signature, result, gradient
    cdef public tuple inputs, outputs, places, _names, _parameters, _checks, _plain
    cdef public tuple gradient_parameters, saved, gradient_sources, non_differentiable
    cdef public bint recorded, waits
    cdef dict __dict__

    cpdef begin(self, tuple args, dict kwargs)
    cpdef run_and_wait(self, args, dict kwargs)
    cpdef take(self, tuple args, dict kwargs)
    cpdef adapter(self, tuple args, dict kwargs)
    cpdef bind(self, args, dict kwargs)
    cdef list _values(self, args, dict kwargs)


cdef class BoundCall:
    cdef public Op op
    cdef public list values
    cdef public tuple sizes, output_sizes, saved_sizes, outputs

    cpdef run(self, inputs)
    cpdef flat(self, result)
    cpdef pack(self, outputs)
    cpdef save(self, inputs, outputs)
    cpdef pull_back(self, grads, saved)
    cpdef gradients(self, grads, saved)


cpdef _adapter(values)
cdef _flatten(values)
cpdef unflatten(flat, sizes)
