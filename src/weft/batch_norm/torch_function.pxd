cdef class Call:
    cdef public object mode, mask
    cdef public tuple results


cdef bint _needs_gradient(x, tuple vectors) except -1
cdef _in_training(module, dict own, x, tuple vectors, mask, axis, bint is_recorded)
cdef _train_on_cuda(x, tuple vectors, batches, mask, epsilon, axis, share, bint has_bessel)
cdef bint _may_change(mean, variance, batches) except -1
