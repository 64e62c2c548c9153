"""Batch norm for people: any rank, any channel axis, any framework's convention, and rows that do not count."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import (
    NUMERIC_DTYPES,
    Array,
    asarray,
    common_library,
    dtype_of,
    get_library,
    get_library_of,
    host,
    is_concrete,
    library_of,
    namespace,
    tensor_memory,
)
from ..core.check import flag, number, one_of, whole
from ..core.inputs import shown, take
from ..errors import FailedPreconditionError, InvalidArgumentError
from ..kernels import direct
from ..kernels.channels import cast
from . import derivatives
from .derivatives import Mode


class BatchNorm(NamedTuple):
    """`y`, and the running statistics after this batch (in inference, and where none were given, as they were)."""

    y: Array
    running_mean: Array | None
    running_variance: Array | None


class _Convention(NamedTuple):
    momentum: float
    epsilon: float
    is_share_of_new: bool  # whether momentum says how much of the batch enters, not how much of the old stays
    has_bessel: bool
    least: int  # how many elements of a channel a batch must have in training


#: The dtypes of what stands beside `x`.
NUMBERS = frozenset(NUMERIC_DTYPES) - {"complex64", "complex128"}

CONVENTIONS = {
    "tensorflow": _Convention(1.0, 1e-3, True, True, 1),
    "torch": _Convention(0.1, 1e-5, True, True, 2),
    "keras": _Convention(0.99, 1e-3, False, False, 1),
}


def batch_norm(
    x: Array,
    scale: Array | None = None,
    offset: Array | None = None,
    running_mean: Array | None = None,
    running_variance: Array | None = None,
    *,
    training: bool,
    momentum: float | None = None,
    epsilon: float | None = None,
    axis: int = -1,
    mask: Array | int | None = None,
    convention: str = "tensorflow",
) -> BatchNorm:
    """`x` normalized channel by channel, and the running statistics after it.

    The `convention` says what `momentum` means and whether the running variance has Bessel's correction, and gives
    both defaults: `"tensorflow"` (the share of the new batch, 1.0; corrected; epsilon 1e-3; this is
    `fused_batch_norm`), `"torch"` (the share of the new batch, 0.1; corrected; 1e-5) or `"keras"` (the share of the
    old, 0.99; not corrected; 1e-3).

    `mask` says which rows (entries of axis 0) count, as booleans or as the number of leading rows; the others are
    padding: they enter no statistic, are zeros in `y`, and receive no gradient. A batch in which nothing counts
    leaves the running statistics alone. `y` is differentiable as often as you like; nothing flows into or out of the
    running statistics.

    >>> import numpy as np
    >>> x = np.array([[1.0, 10.0], [3.0, 30.0], [0.0, 0.0]])
    >>> result = batch_norm(x, training=True, mask=2, epsilon=0.0)
    >>> result.y
    array([[-1., -1.],
           [ 1.,  1.],
           [ 0.,  0.]])
    """
    vectors = scale, offset, running_mean, running_variance
    found = _of_plain(x, vectors, training, momentum, epsilon, axis, mask, convention)
    if found is not None:
        return BatchNorm(*found)
    used = normalized(x, vectors, training, epsilon, axis, mask, convention)
    if not training:
        return BatchNorm(used.y, used.running_mean, used.running_variance)
    return BatchNorm(used.y, *blended(used, momentum, convention))


def _of_plain(
    x: Any, vectors: tuple[Any, ...], training: Any, momentum: Any, epsilon: Any, axis: Any, mask: Any, convention: Any
) -> Any:
    """What `batch_norm` gives for plain arrays of NumPy or tensors of torch; None for others, and if it must be refused.

    The row "function" of benchmarks/batch_norm.py needs it.
    """
    if not (type(axis) is int and type(convention) is str and convention in CONVENTIONS and type(training) is bool):
        return None
    is_numpy = type(x) is np.ndarray
    if not (is_numpy or library_of(x) == "torch") or not -x.ndim <= axis < x.ndim:
        return None
    if (vectors[2] is None) != (vectors[3] is None) or (not training and vectors[2] is None):
        return None
    rules, axis = CONVENTIONS[convention], axis % x.ndim
    epsilon = rules.epsilon if epsilon is None else check_epsilon("epsilon", epsilon)
    share = share_of(momentum, convention) if training else 0.0
    if mask is not None:
        mask = check_mask(x, axis, "numpy" if is_numpy else "torch", mask)
    if not is_numpy:
        from .torch_function import normalize

        return normalize(x, vectors, mask, training, (epsilon, axis, share, rules))
    if not training:
        y = direct.infer(x, *vectors, mask, epsilon, axis)
        return None if y is None else (y, *vectors[2:])
    found = direct.train(x, *vectors, None, mask, epsilon, axis, share, rules.has_bessel, rules.least)
    return found if found is None else (found[0], *(vectors[2:] if vectors[2] is None else found[3:]))


class Normalized(NamedTuple):
    """What a batch gives: `y`, the statistics it was made with, and how many elements of a channel counted."""

    y: Array
    mean: Array
    variance: Array
    count: Any
    running_mean: Array | None  # as they were given, in the dtype of the others
    running_variance: Array | None


def normalized(
    x: Array, given: tuple[Array | None, ...], training: bool, epsilon: float | None, axis: int,
    mask: Array | int | None, convention: str,
) -> Normalized:  # fmt: skip
    """The first part of `batch_norm`; `given` are scale, offset, running mean and variance."""
    one_of("convention", convention, tuple(CONVENTIONS))
    if (given[2] is None) != (given[3] is None):
        raise InvalidArgumentError("running_mean and running_variance must be given together, got only one of them")
    rules = CONVENTIONS[convention]
    x, vectors = take("x", x), list(given)
    for i, name in enumerate(_VECTORS):
        if vectors[i] is not None:
            vectors[i] = take(name, vectors[i])
    training = flag("training", training)
    epsilon = rules.epsilon if epsilon is None else check_epsilon("epsilon", epsilon)
    library = common_library([x, *vectors])
    x = _array("x", x, library)
    axis = _axis(x, axis)
    scale, offset, mean, variance = _vectors(x, axis, library, vectors)
    mask = check_mask(x, axis, library, mask)
    if not training:
        return _inference(x, scale, offset, mean, variance, mask, epsilon, axis)
    count = _count(x, axis, mask)
    if isinstance(count, int):
        if count == 0:
            return Normalized(_zeros_in_graph(x), scale, scale, 0, mean, variance)
        if count < rules.least:
            raise InvalidArgumentError("torch's convention needs more than 1 element per channel in training, got 1")
    used = derivatives.batch_norm(x, scale, offset, None, None, mask, Mode(epsilon, axis, True))
    return Normalized(used.y, _detached(used.used_mean), _detached(used.used_variance), count, mean, variance)


def blended(used: Normalized, momentum: float | None, convention: str) -> tuple[Array | None, Array | None]:
    """The running statistics after a batch that was trained on; as they were where nothing counted."""
    mean, variance, count = used.running_mean, used.running_variance, used.count
    if mean is None or variance is None or (isinstance(count, int) and count == 0):
        return mean, variance
    if not tuple(mean.shape) == tuple(variance.shape) == tuple(used.mean.shape):
        raise changed()
    if library_of(mean) == "torch":
        check_stored(mean, variance)
    share, corrected = shares(count, momentum, convention)
    mean, variance = _detached(mean), _detached(variance)
    new = (1 - share) * mean + share * used.mean, (1 - share) * variance + corrected * used.variance
    if isinstance(count, int):
        return new
    xp = namespace("jax")
    return xp.where(count > 0, new[0], mean), xp.where(count > 0, new[1], variance)


def changed() -> FailedPreconditionError:
    """The error of a call during which somebody changed the running statistics."""
    return FailedPreconditionError(
        "running_mean and running_var must keep one number for each channel, and num_batches_tracked one number, while a "
        "batch norm runs: a hook or another thread changed them"
    )


def check_stored(*tensors: Any) -> None:
    """Refuse tensors of torch whose storage was made smaller than they are: torch would read and write past its end."""
    for x in tensors:
        if _is_plain(x):
            plain = x.detach()
            tensor_memory(plain.view(sys.modules["torch"].int16) if dtype_of(x) == "bfloat16" else plain)
        elif is_concrete(x) and x.is_cuda and x.numel() and not x.data_ptr():
            raise InvalidArgumentError("a tensor on a device must have memory, got one whose storage was freed")


def check_writable(*tensors: Any) -> None:
    """Refuse tensors of torch that cannot be changed in place, before the first of several is changed."""
    check_stored(*tensors)
    for x in tensors:
        if x.is_inference() and not sys.modules["torch"].is_inference_mode_enabled():
            raise InvalidArgumentError(
                "running statistics must be ordinary tensors, got one made in torch.inference_mode"
            )
        if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
            raise InvalidArgumentError(
                "running statistics must be tensors with memory for each element, got an expanded one"
            )


def _is_plain(v: Any) -> bool:
    """Whether a tensor of torch is a vector in host memory and nothing more."""
    torch = sys.modules["torch"]
    return (
        type(v) is torch.Tensor and v.is_cpu and v.is_contiguous() and not v.is_inference()
        and not get_library("torch").has_graph(v)
    )  # fmt: skip


def shares(count: Any, momentum: float | None, convention: str) -> tuple[float, Any]:
    """How much of a batch's mean and variance enters the running ones."""
    share = share_of(momentum, convention)
    return share, share * _bessel(count) if CONVENTIONS[convention].has_bessel else share


def share_of(momentum: float | None, convention: str) -> float:
    """How much of a batch's mean enters the running one."""
    rules = CONVENTIONS[convention]
    share = rules.momentum if momentum is None else check_momentum(momentum)
    return share if rules.is_share_of_new else 1 - share


def _bessel(count: Any) -> Any:
    if isinstance(count, int):
        return count / max(count - 1, 1)
    return count / namespace("jax").where(count > 1, count - 1, 1)


def _inference(
    x: Array, scale: Array, offset: Array, mean: Array | None, variance: Array | None, mask: Array | None,
    epsilon: float, axis: int,
) -> Normalized:  # fmt: skip
    if mean is None or variance is None:
        raise InvalidArgumentError("running_mean and running_variance must be given when training is False")
    if 0 in x.shape:
        return Normalized(_zeros_in_graph(x), mean, variance, 0, mean, variance)
    used = derivatives.batch_norm(x, scale, offset, mean, variance, mask, Mode(epsilon, axis, False))
    return Normalized(used.y, mean, variance, 0, mean, variance)


def _zeros_in_graph(x: Array) -> Array:
    """Zeros like `x` that stay in its graph: a caller without rows takes part in the gradient of its batch."""
    xp = namespace(library_of(x) or "numpy")
    zeros = xp.zeros_like(x)
    return xp.where(zeros != 0, x, zeros)


def _detached(x: Array) -> Array:
    """`x` outside of any graph: no gradient flows through it."""
    return get_library_of(x).detach(x)


def _axis(x: Array, axis: int) -> int:
    if dtype_of(x) not in ("float16", "bfloat16", "float32", "float64"):
        raise InvalidArgumentError(f"x must be one of float16, bfloat16, float32, float64, got {dtype_of(x)}")
    if not -x.ndim <= whole("axis", axis) < x.ndim:
        raise InvalidArgumentError(f"x must have an axis {axis}, that of the channels, got the shape {list(x.shape)}")
    return axis % x.ndim


def _vectors(x: Array, axis: int, library: str, values: list[Any]) -> list[Array | None]:
    """Scale, offset, running mean and variance as vectors: float32, or float64 beside float64; ones and zeros by
    default."""
    xp = namespace(library)
    dtype = xp.float64 if dtype_of(x) == "float64" else xp.float32
    found: list[Array | None] = []
    for name, value in zip(_VECTORS, values, strict=True):
        if value is None:
            default = {"scale": xp.ones, "offset": xp.zeros}.get(name)
            device = {"device": x.device} if library == "torch" else {}
            found.append(default((x.shape[axis],), dtype=dtype, **device) if default else None)
            continue
        vector = _array(name, value, library)
        if dtype_of(vector) not in NUMBERS:
            raise InvalidArgumentError(f"{name} must hold real numbers, got {dtype_of(vector)}")
        if library == "torch" and (vector.device != x.device or str(vector.layout) != "torch.strided"):
            raise InvalidArgumentError(
                f"{name} must be a strided tensor on the device of x, {x.device}, got {vector.layout} on {vector.device}"
            )
        vector = cast(vector, dtype)
        if tuple(vector.shape) != (x.shape[axis],):
            raise InvalidArgumentError(
                f"{name} must have one element for each of the {x.shape[axis]} channels of x, got {list(vector.shape)}"
            )
        found.append(vector)
    return found


_VECTORS = ("scale", "offset", "running_mean", "running_variance")


def _array(name: str, x: Any, library: str) -> Array:
    """What was taken as an array of `library`."""
    try:
        return asarray(x, library)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # text, or numbers that fit no dtype
        raise InvalidArgumentError(f"{name} must be an array of numbers, got {shown(x)}: {error}") from None


def check_momentum(value: Any) -> float:
    """A number that shares running statistics between the old and the new."""
    found = number("momentum", value)
    if not 0 <= found <= 1:
        raise InvalidArgumentError(f"momentum must be a share, from 0 to 1, got {found}")
    return found


def check_epsilon(name: str, value: Any) -> float:
    """A number that can be added to a variance."""
    found = number(name, value)
    if not 0 <= found < math.inf:
        raise InvalidArgumentError(
            f"{name} must be 0 or more, got {found}: a finite number that is added to variances, which may be 0"
        )
    return found


def check_mask(x: Array, axis: int, library: str, mask: Any) -> Array | None:
    """Which rows count, as booleans of the library of `x`."""
    if mask is None:
        return None
    if axis == 0:
        raise InvalidArgumentError("a mask is for rows, and axis 0 holds the channels here")
    xp = namespace(library)
    rows = x.shape[0]
    mask = take("mask", mask)
    if isinstance(mask, (int, np.integer)) and not isinstance(mask, bool):
        if not 0 <= mask <= rows:
            raise InvalidArgumentError(f"mask must be a number of rows of x, from 0 to {rows}, got {shown(mask)}")
        mask = np.arange(rows) < mask
    if library_of(mask) in (None, "numpy"):
        mask = np.asarray(mask)
    elif library_of(mask) != library:
        mask = host(mask)
    if dtype_of(mask) != "bool" or tuple(mask.shape) != (rows,):
        raise InvalidArgumentError(
            f"mask must be one boolean for each of the {rows} rows of x, got {dtype_of(mask)} {list(mask.shape)}"
        )
    if library == "torch":
        # The gradient may need it again, and torch does not notice changes of NumPy's arrays.
        return xp.asarray(mask if library_of(mask) == "torch" else mask.copy(), device=x.device)
    return mask if library == "autograd" else xp.asarray(mask)


def _count(x: Array, axis: int, mask: Array | None) -> Any:
    """How many elements of a channel count: a number, or an array of no axes where that is not known yet."""
    inner = math.prod(n for i, n in enumerate(x.shape) if i not in (0, axis))
    if mask is None:
        return inner if axis == 0 else inner * x.shape[0]
    if is_concrete(mask):
        return int(mask.sum()) * inner
    return cast(mask.sum(), namespace("jax").float32) * inner
