cpdef library_of(x)
cpdef dtype_of(x)
cpdef numpy_views(tensors)
