from weft.core.arrays cimport dtype_of, library_of

cdef tuple _forward(version, tuple inputs, epsilon, factor, data_format, is_training)
cdef tuple _backward(version, tuple inputs, epsilon, data_format, is_training)
cdef tuple _gradient_arguments(version, tuple inputs, epsilon, data_format, is_training)
cdef list _take(version, tuple names, tuple values, int big)
cdef _channel_axis(version, data_format, x, name)
cdef _check_vectors(channels, tuple names, vectors, int needed)
cdef _number(name, value, default, bint is_wide)
cdef bint _flag(value) except -1
cdef _zeros(like, shape)
