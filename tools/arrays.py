"""Arrays of torch and JAX for the differential tools: what their option `--arrays` means.

The values of a case are drawn as NumPy arrays. `convert` makes arrays of another library of them, and `run` calls an op with
them in one of the library's ways: with gradients on or off, traced, mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

LIBRARIES = ["numpy", "torch", "jax"]


def convert(library: str, x: Any, rng: np.random.Generator | None = None) -> Any:
    """A NumPy array as an array of a library, in memory of any strides; texts stay with NumPy."""
    if not isinstance(x, np.ndarray | np.generic) or x.dtype == object:
        return x
    if library == "torch":
        return strided(to_torch(x), rng)
    return to_jax(x) if library == "jax" else x


def to_jax(x: Any) -> Any:
    """An array with its values, also inside `jax.jit`."""
    import jax

    jax.config.update("jax_enable_x64", True)
    with jax.ensure_compile_time_eval():
        return jax.numpy.asarray(x)


def to_torch(x: Any) -> Any:
    import torch

    x = np.array(x)  # in memory of its own, with positive strides
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def strided(x: Any, rng: np.random.Generator | None) -> Any:
    """The same values in memory of other strides."""
    import torch

    kind = 0 if rng is None or not x.ndim else int(rng.integers(4))
    if kind == 1:
        apart = x.new_empty((*x.shape, 2))[..., 1]
        apart.copy_(x)
        return apart
    if kind == 2 and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 3 and str(x.dtype) in ("torch.float32", "torch.float64"):
        return torch.complex(torch.zeros_like(x), -x).conj().imag  # torch only notes that the numbers are to be negated
    return x


def back(x: Any) -> Any:
    """An array of any library as a NumPy array; anything else unchanged."""
    if is_of("torch", x):
        import torch

        x = x.detach().resolve_conj().resolve_neg()
        if x.dtype == torch.bfloat16:
            import ml_dtypes

            return x.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()
    return np.asarray(x) if is_of("jax", x) else x


def is_of(library: str, x: Any) -> bool:
    """True if `x` is an array of torch or of JAX."""
    return type(x).__module__.partition(".")[0] in {"torch": ("torch",), "jax": ("jax", "jaxlib")}.get(library, ())


class Ops:
    """`weft.raw_ops` on arrays of a library: NumPy arrays are converted on the way in, and back on the way out."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Any:
        import weft

        op = getattr(weft.raw_ops, name)

        def call(*args: Any, **given: Any) -> Any:
            given = {key: self.convert(key, value) for key, value in given.items()}
            return self.back(op(*(self.convert("", value) for value in args), **given))

        return call

    def convert(self, key: str, value: Any) -> Any:
        """The argument `key` for weft."""
        if isinstance(value, list):
            return [convert(self.library, x) for x in value]
        return convert(self.library, value)

    def back(self, result: Any) -> Any:
        """A result with NumPy arrays."""
        if isinstance(result, list):
            return [self.back(x) for x in result]
        if isinstance(result, tuple):
            return type(result)(*map(self.back, result))
        return back(result)


# ---- ways to call: each calls a function of arrays that returns arrays


def plain(function: Any, arrays: list[Any]) -> Any:
    return function(*arrays)


def requires_grad(function: Any, arrays: list[Any]) -> Any:
    return function(*(x.detach().requires_grad_() if is_float(x) else x for x in arrays))


def no_grad(function: Any, arrays: list[Any]) -> Any:
    import torch

    with torch.no_grad():
        return requires_grad(function, arrays)


def inference(function: Any, arrays: list[Any]) -> Any:
    import torch

    with torch.inference_mode():
        return function(*(x.clone() for x in arrays))


def after_inference(function: Any, arrays: list[Any]) -> Any:
    import torch

    with torch.inference_mode():
        arrays = [x.clone() for x in arrays]
    return function(*arrays)


def torch_vjp(function: Any, arrays: list[Any]) -> Any:
    import torch

    def of_floats(*floats: Any) -> Any:
        given = iter(floats)
        found = function(*(next(given) if is_float(x) else x for x in arrays))
        return torch.zeros(()), found

    return torch.func.vjp(of_floats, *filter(is_float, arrays), has_aux=True)[2]


def torch_vmap(function: Any, arrays: list[Any]) -> Any:
    import torch

    return entries(torch.vmap(function)(*(torch.stack([x, x]) for x in arrays)))


def jit(function: Any, arrays: list[Any]) -> Any:
    import jax

    return jax.jit(function)(*arrays)


def jax_vjp(function: Any, arrays: list[Any]) -> Any:
    import jax

    return jax.vjp(function, *arrays)[0]


def jax_vmap(function: Any, arrays: list[Any]) -> Any:
    import jax
    import jax.numpy as jnp

    return entries(jax.vmap(function)(*(jnp.stack([x, x]) for x in arrays)))


def entries(mapped: Any) -> list[Any]:
    """The results of the first of two equal entries; the second has the same."""
    for x in mapped:
        assert back(x[0]).tobytes() == back(x[1]).tobytes(), "the entries differ"
    return [x[0] for x in mapped]


def is_float(x: Any) -> bool:
    return bool(x.is_floating_point() or x.is_complex())


WAYS: dict[str, list[Callable[[Any, list[Any]], Any]]] = {
    "numpy": [plain],
    "torch": [plain, requires_grad, no_grad, inference, after_inference, torch_vjp, torch_vmap],
    "jax": [plain, jit, jax_vjp, jax_vmap],
}


#: Ways in which the values of arrays are not known when the op is called.
TRACED = [torch_vmap, jit, jax_vmap]


def run(way: Any, library: str, call: Callable[..., Any], given: dict[str, Any], data: list[str]) -> Any:
    """`call(**given)` with the arrays of `library` among the arguments `data` passed through `way`."""
    inputs: list[Any] = []
    outer = {name: take_out(given[name], library, inputs) if name in data else given[name] for name in given}
    if way is plain or not inputs or (way is torch_vjp and not any(map(is_float, inputs))):
        return call(**given)
    result: list[Any] = []

    def function(*arrays: Any) -> Any:
        outputs: list[Any] = []
        result[:] = [take_out(call(**put_back(outer, iter(arrays))), library, outputs)]
        return tuple(outputs)

    found = way(function, inputs)
    return put_back(result[0], iter(found))


class Place:
    """Where an array was."""


def take_out(value: Any, library: str, found: list[Any]) -> Any:
    """A `Place` for each array of the library, which goes to `found`."""
    if isinstance(value, list | tuple):
        return [take_out(x, library, found) for x in value]
    if not is_of(library, value):
        return value
    found.append(value)
    return Place()


def put_back(value: Any, arrays: Iterator[Any]) -> Any:
    """The arrays in their places."""
    if isinstance(value, dict):
        return {key: put_back(x, arrays) for key, x in value.items()}
    if isinstance(value, list):
        return [put_back(x, arrays) for x in value]
    return next(arrays) if isinstance(value, Place) else value
