from weft.core.arrays cimport dtype_of, library_of

cdef tuple _forward(version, tuple inputs, epsilon, factor, data_format, is_training)
cdef tuple _backward(version, tuple inputs, epsilon, data_format, is_training)
cdef tuple _gradient_arguments(version, tuple inputs, epsilon, data_format, is_training)
cdef int _plain_axis(version, x, tuple vectors, epsilon, data_format, is_training) except? -1
cdef bint _is_like(x, other) except -1
cdef list _take(version, tuple names, tuple values, int big)
cdef _channel_axis(version, data_format, x, name)
cdef _check_vectors(channels, tuple names, vectors, int needed)
cdef _number(name, value, default, bint is_wide)
cdef bint _flag(value) except -1
cdef _zeros(like, shape)
