cpdef forward(x, scale, offset, mean, variance, mask, mode)
cpdef backward(g, x, scale, mean, variance, mask, mode)
cpdef copied(x)
