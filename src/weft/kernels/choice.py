"""The choice of a kernel for an array."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from numpy import ndarray

from ..core.arrays import Array, device_of, dtype_of, is_concrete, library_of
from ..core.inputs import shown
from ..core.memory import hold
from ..errors import FailedPreconditionError, InvalidArgumentError, OpError

_log = logging.getLogger("weft.kernels")

#: The kinds of kernels in order of preference, and the package each needs.
MODULES = {"cuda": "triton", "host": "numpy", "native": "weft._native", "reference": "numpy"}

_BATCH_NORM = (
    "batch_norm", "batch_norm_inference",
    "batch_norm_grad", "batch_norm_inference_grad",
    "batch_norm_grad_grad", "batch_norm_inference_grad_grad",
)  # fmt: skip
_COPIES = ("concat_rows", "cut_rows", "split_rows", "join_rows", "unstack_rows", "stack_rows")
_RAGGED = (
    "all_below", "longest_row", "row_bounds", "take_rows", "pad_rows", "place_rows", "add_rows",
    "row_sum", "row_max", "row_softmax", "range_rows",
)  # fmt: skip

_CUDA_RAGGED = (
    "take_rows", "pad_rows", "place_rows", "add_rows", "repeat_rows", "row_sum", "row_max", "row_softmax",
)  # fmt: skip

#: The files of each kind, and the kernels each file defines.
KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {"cuda": (*_BATCH_NORM[:4], "batch_norm_running"), "cuda_ragged": _CUDA_RAGGED},
    "host": {"host": _COPIES},
    "native": {"native": (*_BATCH_NORM, "batch_norm_running", *_RAGGED)},
    "reference": {"reference": (*_BATCH_NORM, "batch_norm_running", *_COPIES, *_RAGGED, "repeat_rows")},
}
_FILES = {kind: {name: file for file, names in files.items() for name in names} for kind, files in KERNELS.items()}

# The choice for a NumPy array or a CPU tensor, which depends on its dtype alone. Benchmark rows "encode 1k", "row sum 1k" and
# the small shapes of benchmarks/batch_norm.py need it.
_CHOSEN: dict[tuple[str, Any], tuple[str, Callable[..., Any]]] = {}

#: What users are told where there is no extension: pip does not show why it installed pure Python.
WHY_NOT_NATIVE = (
    "there was no C++ compiler, compiling failed, or WEFT_PURE=1 was set; "
    "`WEFT_REQUIRE_NATIVE=1 pip install --force-reinstall --no-cache-dir` shows the error"
)

#: The kind of kernels set by `use`.
FORCED: ContextVar[str | None] = ContextVar("forced", default=None)


def best(name: str, x: Array) -> Callable[..., Any]:
    """Return the kernel `name` that suits `x` best."""
    return _chosen(name, x)[1]


def which(name: str, x: Array) -> str:
    """Return the kind of the kernel that `best` returns."""
    if library_of(x) is None:
        raise InvalidArgumentError(f"which takes an array, whose library, dtype and device decide, got {shown(x)}")
    return _chosen(name, x)[0]


@contextmanager
def use(module: str) -> Iterator[None]:
    """Take every kernel from `module`; raise if it has none for an array, instead of falling back."""
    if not isinstance(module, str) or module not in MODULES:
        raise InvalidArgumentError(f"kernels must be one of {', '.join(MODULES)}, got {module!r}")
    token = FORCED.set(module)
    try:
        yield
    finally:
        FORCED.reset(token)


def _chosen(name: str, x: Array) -> tuple[str, Callable[..., Any]]:
    if FORCED.get() is not None or not (type(x) is ndarray or (library_of(x) == "torch" and x.is_cpu)):
        return _choose_on_cuda(name, x) if FORCED.get() is None and library_of(x) == "torch" else _choose(name, x)
    found = _CHOSEN.get((name, x.dtype))
    if found is None:
        found = _choose(name, x)
        if is_concrete(x):
            _CHOSEN[name, x.dtype] = found
    return found


def _choose_on_cuda(name: str, x: Array) -> tuple[str, Callable[..., Any]]:
    """As `_choose`, for a tensor that is not in host memory: the choice of a Triton kernel depends on the dtype and `accepts`."""
    found = _CHOSEN.get((name, (x.dtype, x.device.type)))
    if found is not None and is_concrete(x):
        module = sys.modules[found[1].__module__]
        if not hasattr(module, "accepts") or module.accepts(x):
            return found
    found = _choose(name, x)
    if found[0] == "cuda":
        _CHOSEN[name, (x.dtype, x.device.type)] = found
    return found


def _choose(name: str, x: Array) -> tuple[str, Callable[..., Any]]:
    forced = FORCED.get()
    for kind in MODULES if forced is None else (forced,):
        file = _FILES[kind].get(name)
        if file is not None and _suits(kind, file, name, x):
            kernel = getattr(import_module(f"{__package__}.{file}"), name)
            if (
                kind == "reference"
                and name in _FILES["native"]
                and not is_installed("native")
                and _reaches("native", x)
            ):
                _tell_once()
            if library_of(x) == "jax":
                return kind, kernel if kind == "reference" else _untraced(name, kernel)
            return kind, _holding(kernel) if kind == "reference" and library_of(x) in ("numpy", "torch") else kernel
    if name not in _FILES["reference"]:
        raise InvalidArgumentError(f"there is no kernel {name!r}")
    where = f"the kernels {forced!r} have" if forced else "there is"
    raise FailedPreconditionError(f"{where} no {name} for a {dtype_of(x)} array of {library_of(x)} on {device_of(x)}")


def _holding(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A reference kernel during which no other thread can resize its NumPy arrays. Other kernels hold their inputs themselves."""

    def call(*args: Any) -> Any:
        held: list[Any] = []
        try:
            return kernel(*[_held(x, held) for x in args])
        except OpError:
            raise
        except (IndexError, ValueError) as error:  # the ops check what they pass on
            raise InvalidArgumentError(f"arrays must not change during a call, got other contents: {error}") from error

    return call


def _untraced(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that was chosen for an array of JAX; if other arrays of the call are traced, as under `jax.vmap`, another one."""

    def call(*args: Any) -> Any:
        traced = next((x for x in args if library_of(x) == "jax" and not is_concrete(x)), None)
        return kernel(*args) if traced is None else best(name, traced)(*args)

    return call


def _held(x: Any, held: list[Any]) -> Any:
    """A view of an array whose memory an object in `held` protects, the same for the arrays of a list, others unchanged."""
    if isinstance(x, ndarray):
        held.append(hold(x))
        return x.view()
    return [_held(y, held) for y in x] if isinstance(x, list) else x


def _suits(kind: str, file: str, name: str, x: Array) -> bool:
    """Whether the kernel `name` of `file` takes `x`."""
    if kind == "reference":
        return True
    if not (_reaches(kind, x) and is_installed(kind)):
        return False
    module = import_module(f"{__package__}.{file}")
    dtypes = module.DTYPES[name] if isinstance(module.DTYPES, dict) else module.DTYPES
    if dtype_of(x) not in dtypes or (
        library_of(x) == "jax" and x.nbytes < getattr(module, "JAX_BYTES", {}).get(name, 0)
    ):
        return False
    return not hasattr(module, "accepts") or module.accepts(x)


def _reaches(kind: str, x: Array) -> bool:
    """Whether kernels of a kind can access the memory of `x`. A traced array has none, nor a device that it could tell."""
    library = library_of(x)
    if not is_concrete(x):
        return False
    if kind == "cuda":
        return library == "torch" and bool(x.is_cuda)
    if kind == "host" or library == "numpy":
        return library == "numpy"
    if library == "torch":
        return bool(x.device.type == "cpu")
    return library == "jax" and len(x.devices()) == 1 and device_of(x).platform == "cpu"


@cache
def _tell_once() -> None:
    _log.warning(
        "weft._native is not installed (%s): batch norm and ragged rows run as array arithmetic, several times slower",
        WHY_NOT_NATIVE,
    )


@cache
def is_installed(kind: str) -> bool:
    """Whether the package that a kind of kernels needs is installed."""
    return find_spec(MODULES[kind]) is not None
