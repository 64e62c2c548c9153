"""The choice of a kernel's implementation, which every call on an array makes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from numpy import ndarray

from ..core.arrays import Array, device_of, dtype_of, is_concrete, library_of
from ..errors import FailedPreconditionError

#: From the most special to the definition, with the package each needs.
MODULES = {"cuda": "triton", "host": "numpy", "native": "weft._native", "cpu": "numba", "reference": "numpy"}

# What was chosen for an array of NumPy, or a tensor in host memory, where its dtype alone decides: small arrays feel the
# price of choosing.
_CHOSEN: dict[tuple[str, Any], tuple[str, Callable[..., Any]]] = {}

#: The kind of kernels that `use` wants.
FORCED: ContextVar[str | None] = ContextVar("forced", default=None)


def best(name: str, x: Array) -> Callable[..., Any]:
    """The kernel called `name` that suits `x` best."""
    return _chosen(name, x)[1]


def which(name: str, x: Array) -> str:
    """The name of the module whose kernel `best` would take."""
    return _chosen(name, x)[0]


@contextmanager
def use(module: str) -> Iterator[None]:
    """Take every kernel from `module`, and raise where it has none for the array instead of falling back."""
    if module not in MODULES:
        raise ValueError(f"no kernels called {module!r}, there are {list(MODULES)}")
    token = FORCED.set(module)
    try:
        yield
    finally:
        FORCED.reset(token)


def _chosen(name: str, x: Array) -> tuple[str, Callable[..., Any]]:
    if FORCED.get() is not None or not (type(x) is ndarray or (library_of(x) == "torch" and x.is_cpu)):
        return _choose(name, x)
    found = _CHOSEN.get((name, x.dtype))
    if found is None:
        found = _choose(name, x)
        if not hasattr(sys.modules[found[1].__module__], "accepts"):
            _CHOSEN[name, x.dtype] = found
    return found


def _choose(name: str, x: Array) -> tuple[str, Callable[..., Any]]:
    forced = FORCED.get()
    for candidate in MODULES if forced is None else (forced,):
        module = _suits(candidate, name, x)
        if module is not None:
            return candidate, getattr(module, name)
    where = f"the kernels {forced!r} have" if forced else "there is"
    raise FailedPreconditionError(f"{where} no {name} for a {dtype_of(x)} array of {library_of(x)} on {device_of(x)}")


def _suits(candidate: str, name: str, x: Array) -> Any:
    file = files(candidate).get(name)
    if file is None:
        return None
    if candidate != "reference" and not (is_concrete(x) and _reaches(candidate, x)):
        return None
    module = import_module(f"{__package__}.{file}")
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
    return library == "numpy" or (library == "jax" and len(x.devices()) == 1 and device_of(x).platform == "cpu")


@cache
def files(candidate: str) -> dict[str, str]:
    """The file of each kernel a kind defines, read from the source: a compiler is not imported to learn that it is not needed."""
    if find_spec(MODULES[candidate]) is None:
        return {}
    folder = Path(__file__).parent
    files = [*folder.glob(f"{candidate}.py"), *sorted(folder.glob(f"{candidate}_*.py"))]
    defined = re.compile(r"^def ([a-z]\w*)\(", re.MULTILINE)
    return {name: path.stem for path in files for name in defined.findall(path.read_text(encoding="utf-8"))}
