"""Which library an array belongs to, where it lives, and what its dtype is called.

No array library but NumPy is imported here: an array of another one can only exist if its library is
already in `sys.modules`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Annotated, Any, TypeAlias

import numpy as np

from ..errors import ArgumentTypeError, InvalidArgumentError, OpError

#: An array of any library. To the type checker it is Any; the mark is how `op` tells inputs from attributes.
Array: TypeAlias = Annotated[Any, "array"]

#: An array whose values are read on the host: indices, ids, splits, sizes. It stays NumPy's beside arrays of JAX, which would cut
#: int64 to int32, and may be NumPy's beside tensors of torch.
Host: TypeAlias = Annotated[Any, "host"]

#: An array that is handed on as it is, and known by its identity.
Kept: TypeAlias = Annotated[Any, "kept"]

#: An array of variants. An op that takes or returns one is never recorded: the arrays inside carry their own graph.
Variant: TypeAlias = Annotated[Any, "variant"]

#: The handle of a resource. An op that takes one is not recorded either: what the resource holds carries its own graph.
Handle: TypeAlias = Annotated[Any, "handle"]

# type -> library, filled as types are met: a handful of entries per library.
_LIBRARY: dict[type, str | None] = {np.ndarray: "numpy"}


def library_of(x: object) -> str | None:
    """`"numpy"`, `"torch"`, `"jax"` or `"autograd"`; None for what is not an array (numbers, lists, text)."""
    kind = type(x)
    try:
        return _LIBRARY[kind]
    except KeyError:
        found = _LIBRARY[kind] = _find_library(x)
        return found


def _find_library(x: object) -> str | None:
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    modules = sys.modules
    if "torch" in modules and isinstance(x, modules["torch"].Tensor):
        return "torch"
    if "jax" in modules and isinstance(x, (modules["jax"].Array, modules["jax"].core.Tracer)):
        return "jax"
    if "autograd" in modules and isinstance(x, modules["autograd.tracer"].Box):
        return "autograd"
    return None


def common_library(arrays: Iterable[object]) -> str:
    """The library of all `arrays`; what is not an array adapts to the others, and to NumPy among itself."""
    found = {library for x in arrays if (library := library_of(x)) is not None}
    if len(found) == 2 and "numpy" in found and "torch" not in found:  # autograd and JAX take NumPy's as theirs
        found.discard("numpy")
    if len(found) > 1:
        raise InvalidArgumentError(f"arrays of one call must come from one library, got {sorted(found)}")
    return found.pop() if found else "numpy"


def namespace(library: str) -> Any:
    """The array-API namespace of a library, from array-api-compat where the library's own differs from it."""
    try:
        return _NAMESPACE[library]
    except KeyError:
        found = _NAMESPACE[library] = _find_namespace(library)
        return found


_NAMESPACE: dict[str, Any] = {}


def _find_namespace(library: str) -> Any:
    if library == "torch":
        import array_api_compat.torch as xp
    elif library == "jax":
        import jax.numpy as xp
    elif library == "autograd":
        import autograd.numpy as xp
    else:  # 80 ms: it takes all of NumPy's lazy submodules with it
        import array_api_compat.numpy as xp
    return xp


def device_of(x: Array) -> Any:
    """Where `x` lives, as something hashable: arrays with equal answers can meet in one batch."""
    library = library_of(x)
    if library == "torch":
        return x.device
    if library == "jax":
        return x.device if is_concrete(x) else "traced"
    return "cpu"


def is_concrete(x: Array) -> bool:
    """Whether the values of `x` can be read now: not a tracer of `jax.jit`, nor a fake or meta tensor of torch."""
    library = library_of(x)
    if library == "jax":
        return not isinstance(x, sys.modules["jax"].core.Tracer)
    if library == "torch":
        return x.device.type != "meta" and not _is_fake(x)
    return True


def _is_fake(x: Array) -> bool:
    """Whether a tensor of torch is a fake one, which has a shape and no values."""
    kind = type(x)
    if kind.__module__ == "torch" or kind.__module__.startswith("torch.nn"):
        return False
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(x, fake.FakeTensor)


def on_host(x: Array) -> bool:
    """Whether NumPy can read `x` where it is."""
    library = library_of(x)
    if library == "jax":
        return is_concrete(x) and all(device.platform == "cpu" for device in x.devices())
    return library == "numpy" or (library == "torch" and x.device.type == "cpu")


def asarray(x: object, library: str = "numpy", dtype: Any = None) -> Array:
    """`x` as an array of `library`; an array of it comes back as it is, NumPy subclasses stripped."""
    if library == "numpy":
        return np.asarray(x, dtype=dtype)
    if library_of(x) == library and dtype is None:
        return x
    return namespace(library).asarray(x, dtype=dtype)


def host(x: Array) -> np.ndarray:
    """The values of `x` as a NumPy array, without a copy where they are in host memory already."""
    library = library_of(x)
    if library == "torch":
        torch = sys.modules["torch"]
        if torch._C._functorch.peek_interpreter_stack() is None:
            return _read(x)
        with torch._C._DisableFuncTorch():  # whatever is done to a tensor would be wrapped again
            return _read(_unwrapped(x))
    if library == "jax" and not is_concrete(x):
        raise InvalidArgumentError("this argument's values are needed now: under jax.jit they are not known yet")
    if library == "autograd":
        while library_of(x) == "autograd":
            x = x._value
    try:
        return np.asarray(x)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgumentError(f"this argument must be readable as an array: {error}") from None


def _read(x: Array) -> np.ndarray:
    """The values of a tensor of torch outside any transform."""
    torch = sys.modules["torch"]
    if x.dtype is torch.bfloat16:
        return x.detach().view(torch.int16).numpy(force=True).view(dtype_in("numpy", "bfloat16"))
    try:
        return tensor_memory(x.detach().cpu())
    except (TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"this argument's values must be readable on the host: {error}") from None


def tensor_memory(x: Any) -> np.ndarray:
    """The memory of a detached CPU tensor of torch as a NumPy array.

    The memory stays in its place: the detached tensor is nobody else's, and torch does not resize a storage that a NumPy
    array was made of. A storage that was resized before must still have room for all the tensor's elements.
    """
    try:
        found: np.ndarray = x.numpy()
    except RuntimeError:  # its numbers are the negatives or conjugates of those in memory
        return x.numpy(force=True)
    if found.size and x.untyped_storage().nbytes() < _end_of(x) * found.itemsize:
        raise InvalidArgumentError(
            f"a tensor's storage must have room for its elements, got the shape {list(x.shape)} in a storage of "
            f"{x.untyped_storage().nbytes()} bytes: it was resized"
        )
    return found


def _end_of(x: Any) -> int:
    """The place behind the last element of a tensor that has some, counted in elements from the start of its storage."""
    if x.is_contiguous():
        return int(x.storage_offset() + x.numel())
    spans = [(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return int(x.storage_offset() + sum(spans) + 1)


def over_memory(tensors: Iterable[Any]) -> list[Any] | None:
    """CPU tensors of torch as NumPy arrays over the same memory, None as it is; None if anything else is among them."""
    torch = sys.modules["torch"]
    kinds, dtypes = (torch.Tensor, torch.nn.Parameter), _both_have()
    found: list[Any] = []
    for x in tensors:
        if x is not None:
            if type(x) not in kinds or not x.is_cpu or x.dtype not in dtypes:
                return None
            try:
                x = tensor_memory(x.detach())
            except InvalidArgumentError:
                raise
            except (ValueError, TypeError, RuntimeError):  # nothing, in sizes whose product overflows; a sparse tensor
                return None
        found.append(x)
    return found


@cache
def _both_have() -> frozenset[Any]:
    """The dtypes of torch that NumPy has, too."""
    return frozenset(getattr(sys.modules["torch"], name) for name in ("bool", "float16", "float32", "float64"))


def _unwrapped(x: Array) -> Array:
    """The tensor inside the wrappers of `torch.func.grad`; under `torch.vmap` there is none whose values could be read."""
    inside = sys.modules["torch"]._C._functorch
    while inside.is_functorch_wrapped_tensor(x):
        if inside.is_batchedtensor(x):
            raise InvalidArgumentError("this argument's values are needed now: under torch.vmap they are not known")
        x = inside.get_unwrapped(x)
    return x


def index_like(values: np.ndarray, library: str) -> Array:
    """Host integers in the form they have beside arrays of `library`: a CPU tensor for torch, else NumPy.

    JAX would cut int64 to int32, so NumPy stays NumPy there.
    """
    if library == "torch":
        return sys.modules["torch"].from_numpy(values)
    return values


@lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """`"float32"`, `"bfloat16"`, `"string"`, ...: TensorFlow's name of a dtype given as text, NumPy, torch or JAX dtype."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype)
    text = text.removeprefix("torch.")
    if text in _NAMES:
        return _NAMES[text]
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"a dtype must be one of {', '.join(_NAMES)}, got {text[:64]!r}") from None
    if found.kind in "SUTO":
        return "string"
    return _NAMES.get(found.name, found.name)


def dtype_attribute(given: Any, name: str = "dtype") -> str:
    """The name of a dtype that a caller gave as the attribute `name`."""
    try:
        # NumPy takes None for float64, and any class for objects.
        if given is not None and (not isinstance(given, type) or given in _CLASSES or _is_dtype(given)):
            return dtype_name(given)
    except OpError:
        raise
    except Exception:  # it is not hashable, or its own code raises
        pass
    came = given if isinstance(given, type) else type(given)
    raise ArgumentTypeError(f"{name} must be a dtype, got {came.__name__}")


def _is_dtype(kind: type) -> bool:
    """Whether a class stands for a dtype: NumPy's `np.float32`, JAX's `jnp.float32`."""
    return issubclass(kind, np.generic) or isinstance(getattr(kind, "dtype", None), np.dtype)


_CLASSES = (bool, int, float, complex, str, bytes, object)


_NUMBERS = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_NAMES = {name: name for name in [*_NUMBERS, "string", "variant", "resource"]} | {
    "half": "float16", "float": "float32", "double": "float64", "str": "string", "object": "string",
}  # fmt: skip


def dtype_of(x: Array) -> str:
    """TensorFlow's name of the dtype of `x`."""
    return dtype_name(x.dtype)


def dtype_in(library: str, name: str) -> Any:
    """The dtype a library has for one of TensorFlow's names; strings are objects."""
    if library == "torch":
        return getattr(sys.modules["torch"], name)
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(object if name == "string" else name)


@cache
def memory() -> int:
    """The bytes of memory this machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no POSIX
        return 1 << 40


def reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` in another shape, itself where it has that shape already."""
    return x if tuple(x.shape) == shape else namespace(library_of(x) or "numpy").reshape(x, shape)


def lowest_of(x: Array) -> float | int | bool:
    """What no number of the dtype of `x` is below."""
    name = dtype_of(x)
    if name == "bool":
        return False
    return float("-inf") if "float" in name else int(np.iinfo(name).min)


def first_row(arrays: Sequence[Array]) -> Array:
    """The first row there is in `arrays`, of which some may have none."""
    for x in arrays:
        if x.shape[0]:
            return x[:1]
    raise InvalidArgumentError("a batch that is padded must have at least one row, got none")
