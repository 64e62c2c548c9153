cdef class Call:
    cdef public object epsilon, axis
    cdef public tuple used

    cpdef run(self, x, scale, offset)


cdef class RunningCall(Call):
    cdef public tuple running, weights

    cpdef run(self, x, scale, offset)


cdef _in_training(module, dict own, x, scale, offset, axis, count, bint is_recorded)
cdef bint _may_change(tuple running) except -1
