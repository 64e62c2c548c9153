"""Which implementation of a kernel runs: the array in hand decides.

A kernel is a function of the same name in several modules. `reference` is the definition, in array-API code that every
library runs; `host` is NumPy where NumPy alone reaches memory speed, `cpu` is Numba, `cuda` is Triton. A module lists in
`DTYPES` what it takes, for all kernels or for each by name, and may hold `JAX_BYTES`, what a JAX array must have at least,
and `accepts(name, x)` for a closer look; a kernel exists there by being defined there. The kernels of one kind may lie in
several files, `cpu.py`, `cpu_rows.py`, ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from numpy import ndarray

from .._arrays import Array, device_of, dtype_of, is_concrete, library_of
from ..errors import FailedPreconditionError

#: From the most special to the definition, with the package each needs.
MODULES = {"cuda": "triton", "host": "numpy", "cpu": "numba", "reference": "numpy"}

# What was chosen for a NumPy array of a dtype, where the dtype alone decides: small batches feel the price of choosing.
_NUMPY_BEST: dict[tuple[str, Any], Callable[..., Any]] = {}

_FORCED: ContextVar[str | None] = ContextVar("forced", default=None)


def best(name: str, x: Array) -> Callable[..., Any]:
    """The kernel called `name` that suits `x` best."""
    if type(x) is ndarray and _FORCED.get() is None:
        found = _NUMPY_BEST.get((name, x.dtype))
        if found is not None:
            return found
    return _choose(name, x)[1]


def which(name: str, x: Array) -> str:
    """The name of the module whose kernel `best` would take."""
    return _choose(name, x)[0]


@contextmanager
def use(module: str) -> Iterator[None]:
    """Take every kernel from `module`, and raise where it has none for the array instead of falling back."""
    if module not in MODULES:
        raise ValueError(f"no kernels called {module!r}, there are {list(MODULES)}")
    token = _FORCED.set(module)
    try:
        yield
    finally:
        _FORCED.reset(token)


def warmup(dtypes: Sequence[str] = ("float32",)) -> None:
    """Compile the CPU kernels for some dtypes ahead of their first use; the result stays on disk.

    Where Numba is not installed there is nothing to compile.
    """
    for file in sorted({*_files("cpu").values()}):
        import_module(f"{__name__}.{file}").warm_up(dtypes)


def _choose(name: str, x: Array) -> tuple[str, Callable[..., Any]]:
    forced = _FORCED.get()
    for candidate in MODULES if forced is None else (forced,):
        module = _suits(candidate, name, x)
        if module is not None:
            kernel = getattr(module, name)
            if forced is None and type(x) is ndarray and not hasattr(module, "accepts"):
                _NUMPY_BEST[name, x.dtype] = kernel
            return candidate, kernel
    where = f"the kernels {forced!r} have" if forced else "there is"
    raise FailedPreconditionError(f"{where} no {name} for a {dtype_of(x)} array of {library_of(x)} on {device_of(x)}")


def _suits(candidate: str, name: str, x: Array) -> Any:
    file = _files(candidate).get(name)
    if file is None:
        return None
    if candidate != "reference" and not (is_concrete(x) and _reaches(candidate, x)):
        return None
    module = import_module(f"{__name__}.{file}")
    if candidate != "reference":
        taken = module.DTYPES
        if dtype_of(x) not in (taken[name] if isinstance(taken, dict) else taken):
            return None
        if library_of(x) == "jax" and x.nbytes < getattr(module, "JAX_BYTES", 0):
            return None
    accepts = getattr(module, "accepts", None)
    return module if accepts is None or accepts(name, x) else None


def _reaches(candidate: str, x: Array) -> bool:
    """Whether the module's kernels can touch the memory of `x`."""
    library = library_of(x)
    if candidate == "host":
        return library == "numpy"
    if candidate == "cuda":
        return library == "torch" and x.device.type == "cuda"
    if library == "torch":
        return bool(x.device.type == "cpu")
    return library == "numpy" or (library == "jax" and device_of(x).platform == "cpu")


@cache
def _files(candidate: str) -> dict[str, str]:
    """The file of each kernel a kind defines, read from the source: a compiler is not imported to learn that it is not needed."""
    if find_spec(MODULES[candidate]) is None:
        return {}
    folder = Path(__file__).parent
    files = [*folder.glob(f"{candidate}.py"), *sorted(folder.glob(f"{candidate}_*.py"))]
    defined = re.compile(r"^def ([a-z]\w*)\(", re.MULTILINE)
    return {name: path.stem for path in files for name in defined.findall(path.read_text(encoding="utf-8"))}


# Not at the first call: a process forked while another thread imports a module finds that module locked for ever.
from . import host, reference  # noqa: E402, F401
