import cython


cdef tuple _modes, _jax_readers, _last_jax


@cython.locals(at=Py_ssize_t)
cpdef torch_mode()
cpdef bint has_unkeyed_modes() except -1
@cython.locals(last=tuple, seen=list)
cpdef jax_mode()
