cpdef tuple tensors(object in_tensors)
cpdef split_rows(object x, list offsets)
