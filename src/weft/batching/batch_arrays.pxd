cpdef tuple tensors(object in_tensors)
