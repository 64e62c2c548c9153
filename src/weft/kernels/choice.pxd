from weft.core.arrays cimport dtype_of, library_of

cpdef best(str name, x)
cpdef which(str name, x)
cdef tuple _chosen(str name, x)
cdef tuple _choose(str name, x)
cdef tuple _choose_on_cuda(str name, x)
