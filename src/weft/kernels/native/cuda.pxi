# Batch norm of tensors on CUDA: arguments are checked here, the kernels are those of kernels/cuda_call.py. As in plain.pxi, a function
# returns None, and changes nothing, if its arguments are not plain or must be refused. Included by module.pyx.

cdef object _cuda = None  # the module weft.kernels.cuda_call; False if it cannot be used
cdef dict _cuda_calls = {}  # what `find_call` of that module found, by kernel and description of x


cdef bint _is_on_cuda(object x, View* view) except -1:
    """True if `x` is a plain tensor on CUDA; describes it."""
    if type(x) is np.ndarray or not (_tensor is not None or _meet_torch()):
        return False
    return _look_at_tensor(x, view) and view.device >= 0 and not _is_neg(x)


cdef object _cuda_call(str kernel, str option, value, object x, View* view, int axis, tuple vectors):
    """How to call a kernel for `x` and one vector per channel; None if they must be prepared first."""
    cdef View vector
    cdef int64_t[6 + 2 * MOST] key
    cdef int64_t elements = 1
    cdef int i
    if not (0 <= axis < view.ndim and view.ndim >= 2 and view.kind != FLOAT64) or FORCED.get() is not None or _is_inference(x):
        return None
    for i in range(view.ndim):
        elements *= view.shape[i]
        key[i], key[view.ndim + i] = view.shape[i], view.strides[i]
    if not 0 < elements < 1 << 31:
        return None
    for v in vectors:
        if not (
            _is_on_cuda(v, &vector) and vector.device == view.device and vector.kind == FLOAT32 and vector.ndim == 1
            and vector.shape[0] == view.shape[axis] and (vector.strides[0] == 1 or vector.shape[0] == 1)
        ):
            return None
    i = 2 * view.ndim
    key[i], key[i + 1], key[i + 2], key[i + 3] = view.device, <int>view.kind, axis, value
    name = kernel, PyBytes_FromStringAndSize(<char*>key, (i + 4) * sizeof(int64_t))
    found = _cuda_calls.get(name)
    if found is None and _load_cuda():
        if len(_cuda_calls) >= 4096:
            _cuda_calls.clear()
        found = _cuda_calls[name] = _cuda.find_call(kernel, x, axis, **{option: value}) or False
    return found or None


cdef bint _load_cuda() except -1:
    global _cuda
    if _cuda is None:
        _cuda = import_module("weft.kernels.cuda_call") if is_installed("cuda") else False
    return _cuda is not False


cdef tuple _train_on_cuda(
    View* view, x, scale, offset, mean, variance, batches, double epsilon, int axis, double share, bint has_bessel, int64_t least
):
    """The results of `_train`, and without `batches` a zero."""
    cdef weft_dl_tensor counter
    cdef int64_t count = 1
    cdef int i, update = 1 if mean is None else 2 if batches is None else 3
    if update == 3 and not (_may_change(mean, variance, batches) and _is_number(batches, view.device, &counter)):
        return None
    call = _cuda_call(
        "forward", "UPDATE", update, x, view, axis, (scale, offset) if mean is None else (scale, offset, mean, variance)
    )
    for i in range(view.ndim):
        count *= 1 if i == axis else view.shape[i]
    if call is None or count < least or (update == 3 and _is_inference(scale)):  # of which no node could be made
        return None
    weights = 1 - share, share, share * count / max(count - 1, 1) if has_bessel else share
    running = None if mean is None else (mean, variance)
    if update == 3:
        return _cuda.train_in_place(call, x, scale, offset, epsilon, running, batches, weights)
    return _cuda.train(call, x, scale, offset, epsilon, running, weights)


cdef object _infer_on_cuda(View* view, x, scale, offset, mean, variance, double epsilon, int axis, bint has_copies):
    """`x` normalized, or with `has_copies` the six results of FusedBatchNormV3."""
    call = _cuda_call("inference", "COPIES", has_copies, x, view, axis, (scale, offset, mean, variance))
    if call is None:
        return None
    return (_cuda.infer_and_copy if has_copies else _cuda.infer)(call, x, scale, offset, mean, variance, epsilon)


cdef tuple _grad_on_cuda(View* view, g, x, scale, mean, variance, double epsilon, int axis, bint is_training):
    """The five results of FusedBatchNormGradV3."""
    cdef View other
    if not (_is_on_cuda(g, &other) and other.device == view.device and _is_same(&other, view)):
        return None
    call = _cuda_call("backward", "TRAINING", is_training, x, view, axis, (scale, mean, variance))
    return None if call is None else _cuda.differentiate(call, g, x, scale, mean, variance, epsilon)
