# Whole calls of batch norm on plain arrays: one look at each array, one kernel. For arguments that are not plain or that must be
# refused these functions return None and change nothing; the caller then checks the arguments one by one. Included by module.pyx.

def train(
    x, scale, offset, mean, variance, batches, mask, double epsilon, int axis, double share, bint has_bessel, int64_t least
):
    """y, the mean and variance of `x`, and running ones after it: `share` of the new, the rest of the old if there are old ones.

    At least `least` elements of a channel must count. With `batches`, a count, all three are to be changed in place: on CUDA the
    kernel does so, and there are three results; in host memory `keep` does so, with the last two of five results. All but the
    first of those are arrays of NumPy.
    """
    return _train(x, scale, offset, mean, variance, batches, mask, epsilon, axis, share, has_bessel, least)


cdef tuple _train(
    x, scale, offset, mean, variance, batches, mask, double epsilon, int axis, double share, bint has_bessel, int64_t least
):
    cdef Blend blend
    cdef View view
    cdef weft_dl_tensor count
    if _is_on_cuda(x, &view):
        if mask is not None:
            return None
        return _train_on_cuda(&view, x, scale, offset, mean, variance, batches, epsilon, axis, share, has_bessel, least)
    if FORCED.get() is not None:
        return None
    if batches is not None and not (
        _may_change(mean, variance, batches) and _is_number(batches, -1, &count)
        and _is_vector(mean, &view) and _is_vector(variance, &view)
    ):
        return None
    blend.keep, blend.share, blend.corrected = 1 - share, share, share
    blend.has_bessel, blend.outside = has_bessel, 5 if batches is None else 1
    vectors = (scale, offset) if mean is None else (scale, offset, mean, variance)
    return _call(FORWARD, (x,), vectors, epsilon, axis, mask, least, &blend)


def differentiate(g, x, scale, mean, variance, mask, double epsilon, int axis):
    """The gradients of a batch norm in training for x, scale and offset."""
    cdef View view
    cdef tuple found
    if FORCED.get() is not None or not (_tensor is not None or _meet_torch()) or not _look_at_tensor(x, &view):
        return None
    if view.device < 0:
        return _call(GRAD, (g, x), (scale, mean, variance), epsilon, axis, mask, 0)
    found = None if mask is not None else _grad_on_cuda(&view, g, x, scale, mean, variance, epsilon, axis, True)
    return None if found is None else found[:3]


def infer(x, scale, offset, mean, variance, mask, double epsilon, int axis):
    """`x` normalized with a given mean and variance."""
    cdef View view
    if _is_on_cuda(x, &view):
        return None if mask is not None else _infer_on_cuda(&view, x, scale, offset, mean, variance, epsilon, axis, False)
    found = _infer(x, scale, offset, mean, variance, mask, epsilon, axis, False)
    return None if found is None else found[0]


cdef tuple _infer(x, scale, offset, mean, variance, mask, double epsilon, int axis, bint has_copies):
    """`x` normalized, and with `has_copies` two copies of the mean and the variance."""
    if FORCED.get() is not None:
        return None
    return _call(INFERENCE, (x,), (scale, offset, mean, variance), epsilon, axis, mask, 1, NULL, has_copies)


def fused_batch_norm(version, x, scale, offset, mean, variance, epsilon, factor, data_format, is_training):
    """The six results of FusedBatchNormV3; `version` has its dtypes and the channels' axis of each data format."""
    cdef View view
    cdef int axis = _axis(version, x, epsilon, data_format, is_training, &view)
    cdef double share
    cdef tuple found
    if axis < 0 or type(factor) is not float:
        return None
    share, epsilon = _stored(factor, view.kind), _stored(epsilon, view.kind)
    if not is_training:
        if view.device >= 0:
            return _infer_on_cuda(&view, x, scale, offset, mean, variance, epsilon, axis, True)
        found = _infer(x, scale, offset, mean, variance, None, epsilon, axis, True)
        return None if found is None else (*found, _zero(found[1]))
    if share == 1:
        if not (_is_alike(mean, scale) and _is_alike(variance, scale)):
            return None
        mean = None
    found = _train(x, scale, offset, mean, variance, None, None, epsilon, axis, share, True, 1)
    if found is None:
        return None
    return found[0], found[3], found[4], found[1], found[2], found[5] if view.device >= 0 else _zero(found[1])


def fused_batch_norm_grad(version, g, x, scale, mean, variance, epsilon, data_format, is_training):
    """The five results of FusedBatchNormGradV3."""
    cdef View view
    cdef int axis = _axis(version, x, epsilon, data_format, is_training, &view)
    cdef tuple found
    if axis < 0 or FORCED.get() is not None:
        return None
    epsilon = _stored(epsilon, view.kind)
    if view.device >= 0:
        return _grad_on_cuda(&view, g, x, scale, mean, variance, epsilon, axis, is_training)
    found = _call(GRAD if is_training else INFERENCE_GRAD, (g, x), (scale, mean, variance), epsilon, axis, None, 1)
    if found is None:
        return None
    return found[0], found[1], found[2], _empty(view.kind, _library(x)), _empty(view.kind, _library(x))


cdef int _axis(object version, object x, object epsilon, object data_format, object is_training, View* view) except? -1:
    """The channels' axis of an op's call, -1 if its attributes or `x` are unusual; describes `x`."""
    cdef int axis
    if not (type(epsilon) is float and (is_training is True or is_training is False) and type(data_format) is str):
        return -1
    found = (<dict>(<tuple>version)[1]).get(data_format)
    if found is None or not (_look(x, view) or _is_on_cuda(x, view)):
        return -1
    if not 4 <= view.ndim <= 5 or _NAMES[<int>view.kind] not in <tuple>(<tuple>version)[0]:
        return -1
    axis = found
    return axis + view.ndim if axis < 0 else axis


cdef double _stored(double value, Dtype kind) noexcept:
    """A number as TensorFlow stores it: in float32, beside float64 data in full."""
    return value if kind == FLOAT64 else <double><float>value


cdef bint _is_alike(object v, object other) except -1:
    """True if `v` is an array or a tensor of the type, dtype and rank of another."""
    if type(v) is np.ndarray and type(other) is np.ndarray:
        return (<np.ndarray>v).descr is (<np.ndarray>other).descr and np.PyArray_NDIM(v) == np.PyArray_NDIM(other)
    return type(v) is _tensor and type(other) is _tensor and v.dtype == other.dtype and v.ndim == other.ndim


cdef object _empty(Dtype kind, str library):
    """A vector without elements, beside data of a dtype."""
    return _in_library(_vector(0, FLOAT64 if kind == FLOAT64 else FLOAT32), FLOAT32, library)


cdef bint _is_number(object x, int device, weft_dl_tensor* tensor) except -1:
    """True if `x` is a tensor of one int64 on a device, -1 for host memory; describes it."""
    cdef int i
    if _exchange is NULL or type(x) is not _tensor:
        return False
    try:
        _exchange.look(<void*>x, tensor)
    except RuntimeError:
        return False
    if tensor.data is NULL or tensor.code != 0 or tensor.bits != 64 or tensor.device_type != (1 if device < 0 else 2):
        return False
    if device >= 0 and tensor.device_id != device:
        return False
    for i in range(tensor.ndim):
        if tensor.shape[i] != 1:
            return False
    return True
