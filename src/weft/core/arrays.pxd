cpdef library_of(x)
cpdef dtype_of(x)
cpdef over_memory(tensors)
