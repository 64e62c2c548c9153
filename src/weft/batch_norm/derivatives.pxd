cpdef forward(x, scale, offset, mean, variance, mask, epsilon, axis, is_training)
cpdef backward(g, x, scale, mean, variance, mask, epsilon, axis, is_training)
cpdef copied(x)
