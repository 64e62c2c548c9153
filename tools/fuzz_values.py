"""Hostile values for `fuzz_arguments.py`: what no argument should be, and what few are."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import weft
from weft.core.arrays import library_of
from weft.core.inputs import is_freed

DTYPES = ["?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "g", "F", "D", "G", ">f2", ">f4", ">f8", ">i2", ">i4", ">i8",
          ">u4", ">c8", ">U3", "U3", "S3", "O", "M8[s]", "m8[s]", "V4", "S0", [("a", "i4"), ("b", ">f4")]]  # fmt: skip
SHAPES = [(), (0,), (1,), (3,), (4,), (2, 3), (0, 3), (2, 0, 3), (1, 1, 1, 3), (2, 2, 2, 4), (1,) * 30]
NUMBERS = [0, -1, 1, 2, 3, 2**31 - 1, 2**31, -(2**31) - 1, 2**62, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400, 10**5000,
           0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), 1j, complex("nan"), True, False]  # fmt: skip
TEXTS = [
    "",
    "a",
    "float32",
    "int64",
    "NHWC",
    "NCHW",
    "ROW_SPLITS",
    "\udcff",
    "x" * 10000,
    b"",
    b"a",
    b"\xff\xfe",
    b"float32",
]


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


Pair = collections.namedtuple("Pair", "a b")


class Raises:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no {name}")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no array")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class Pretends:
    """Looks like an array, and is none."""

    shape = (2,)
    dtype = np.dtype("f4")
    ndim = 1


class Lies:
    """Has an `__array__` that gives no array."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return "no array"


class Changes:
    """Gives an array of another size each time."""

    calls = 0

    def __array__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        return np.ones(1000 if self.calls % 2 else 1, np.float32)

    def __len__(self) -> int:
        return 3


class Misstates(np.ndarray):
    """Says another shape and size than it has."""

    shape = property(lambda self: (1000, 1000))  # type: ignore[assignment]
    size = property(lambda self: 1_000_000)  # type: ignore[assignment]
    nbytes = property(lambda self: 8)  # type: ignore[assignment]


class Strange(np.ndarray):
    """An array whose arithmetic raises."""

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no arithmetic")

    def __array_function__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no functions")


class Listing(list):  # type: ignore[type-arg]
    """A list that cannot be walked."""

    def __iter__(self) -> Any:
        raise RuntimeError("no walking")


def in_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def twice_in_itself() -> list[Any]:
    made: list[Any] = []
    made.extend([made, made])
    return made


def deep(depth: int = 20_000) -> list[Any]:
    made: list[Any] = [1]
    for _ in range(depth):
        made = [made]
    return made


def shared(depth: int = 45) -> list[Any]:
    """A list of two to the 45 numbers that share their memory."""
    made: list[Any] = [1, 1]
    for _ in range(depth):
        made = [made, made]
    return made


def generator() -> Any:
    yield from (1, 2, 3)


PYTHON: list[Callable[[], Any]] = [
    lambda: None, object, lambda: object, lambda: int, lambda: np.float32, set, lambda: {1, 2}, lambda: frozenset([1]), dict,
    lambda: {"a": 1}, lambda: range(3), lambda: range(2**70), lambda: range(2**40), generator, lambda: iter([1, 2]),
    itertools.count, lambda: len, lambda: ..., lambda: slice(None), lambda: NotImplemented, lambda: fractions.Fraction(1, 3),
    lambda: decimal.Decimal("0.1"), lambda: datetime.datetime(2020, 1, 1), lambda: array.array("i", [1, 2]),
    lambda: bytearray(b"ab"), lambda: memoryview(b"abc"), list, lambda: (), lambda: [[]], lambda: [None], lambda: [1, "a"],
    lambda: [1, [2]], lambda: [[1], [1, 2]], lambda: [object()], lambda: [{}], lambda: [b"a", "a"], lambda: [2**70, 1],
    lambda: [10**5000], lambda: [float("nan")], lambda: [1j], lambda: [True, 2, 3.5], lambda: ["a", "b"], lambda: [0, 2, 3],
    lambda: [[0, 2, 3]], in_itself, twice_in_itself, deep, lambda: tuple(in_itself()), shared, lambda: Pair(1, 2),
    lambda: collections.deque([1, 2]), lambda: collections.UserList([1, 2]), lambda: Colour.RED, lambda: Number.ONE, Raises,
    Pretends, Lies, Changes,
    lambda: Listing([1, 2]), lambda: [Raises()], lambda: [Pretends()], lambda: weft.VariantArray([np.ones(2)]),
    lambda: weft.VariantArray([]), lambda: weft.RaggedTensor.from_rows([[1.0], [2.0]]), lambda: weft.TensorArray("float32", 2),
    lambda: weft.raw_ops.TensorArrayV3(2, "float32").handle, lambda: weft.raw_ops.Batch, lambda: np, lambda: np.dtype("f4"),
    lambda: np.dtype([("a", "i4")]), lambda: np.dtypes.StringDType(), lambda: ValueError("a"), lambda: Exception,
]  # fmt: skip


def from_numpy(rng: random.Random) -> Any:
    """An array of NumPy: of any dtype, shape and layout."""
    dtype, shape = np.dtype(rng.choice(DTYPES)), rng.choice(SHAPES)
    made = np.zeros(shape, dtype)
    if made.size and dtype.kind in "iuf" and rng.random() < 0.5:
        limits = (
            [np.nan, np.inf, -np.inf, 1e4] if dtype.kind == "f" else [np.iinfo(dtype).min, np.iinfo(dtype).max, 1, 3]
        )
        made[...] = rng.choice(limits)
    if dtype.kind == "O":
        made[...] = rng.choice([None, 1, "a", b"a", object()])
    return rng.choice(NUMPY)(made)


def _unaligned(x: np.ndarray) -> np.ndarray:
    if x.dtype.hasobject:
        return x
    memory = np.zeros(x.nbytes + 1, np.uint8)
    return memory[1:].view(x.dtype).reshape(x.shape) if x.nbytes else x


def _read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


NUMPY: list[Callable[[np.ndarray], Any]] = [
    *[lambda x: x] * 12,
    lambda x: x[()] if not x.shape else x[::-1],
    lambda x: np.ma.masked_array(x, False),
    lambda x: np.ma.masked,
    lambda x: x.view(Strange),
    lambda x: x.view(Misstates),
    lambda x: np.lib.stride_tricks.as_strided(x, (3, 3), (0, 0)) if x.size else x,
    lambda x: np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (1, 1), (2**62, -(2**62))),
    lambda x: np.asmatrix(x) if x.ndim < 3 else x.view(np.recarray),
    lambda x: np.broadcast_to(x.reshape(-1)[:1].reshape(()) if x.size else 1, (2**40,)),
    lambda x: np.broadcast_to(1, (2**20, 2**20)),
    lambda x: np.broadcast_to(np.int64(0), (2**33,)),
    lambda x: np.broadcast_to(np.zeros((), "S0"), (2**40,)),
    lambda x: np.empty((0, 2**62), np.int8),
    _unaligned,
    _read_only,
    lambda x: np.array(2**63, np.uint64),
    lambda x: [x, x],
    lambda x: (x,),
    lambda x: [x, 1],
]


def from_torch(rng: random.Random) -> Any:
    """A tensor of torch: of any dtype, kind and layout."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.uint8,
              torch.int8, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.float8_e5m2]  # fmt: skip
    shape, dtype = rng.choice(SHAPES), rng.choice(dtypes)
    x = torch.zeros(shape, dtype=dtype)
    floats = torch.ones(shape)

    def fake() -> Any:
        with FakeTensorMode():
            return torch.ones(shape)

    def inference() -> Any:
        with torch.inference_mode():
            return torch.ones(shape)

    def resized(size: int) -> Any:
        made = torch.ones(100)
        made.untyped_storage().resize_(size)
        return made

    class Own(torch.Tensor):
        pass

    ways: list[Callable[[], Any]] = [
        *[lambda: x] * 10,
        lambda: x.to("meta"),
        fake,
        inference,
        lambda: torch.ones(shape, dtype=torch.complex64).conj(),
        lambda: torch.ones(shape, dtype=torch.complex64).conj().imag,
        lambda: torch._neg_view(floats),
        lambda: resized(0),
        lambda: torch.arange(8.0).as_strided((3, 3), (1, 1), 2),
        lambda: floats.requires_grad_(),
        lambda: floats.requires_grad_() * 2,
        lambda: torch.nn.Parameter(floats),
        lambda: floats.as_subclass(Own),
        lambda: torch.quantize_per_tensor(floats, 1.0, 0, torch.qint8),
        lambda: floats.to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch._efficientzerotensor(3),
        lambda: torch.zeros(1, dtype=torch.int64).expand(2**40),
        lambda: torch.zeros(1).expand(2**33),
        lambda: torch.ones(2, 3).T,
        lambda: [x, x],
        lambda: [x, 1],
        lambda: torch.float32,
        lambda: torch.device("cpu"),
        lambda: torch.Size([2, 3]),
    ]
    return rng.choice(ways)()


def from_jax(rng: random.Random) -> Any:
    """An array of JAX, or what is taken for one."""
    import jax
    import jax.numpy as jnp

    dtypes = ["float32", "float16", "bfloat16", "int32", "int8", "uint32", "bool", "complex64", "int4", "float8_e5m2"]
    shape, dtype = rng.choice(SHAPES), rng.choice(dtypes)

    def deleted() -> Any:
        made = jnp.ones(shape)
        made.delete()
        return made

    def leaked() -> Any:
        held: list[Any] = []
        jax.make_jaxpr(lambda y: held.append(y) or y)(jnp.ones(shape))
        return held[0]

    ways: list[Callable[[], Any]] = [
        *[lambda: jnp.zeros(shape, dtype)] * 8,
        deleted,
        leaked,
        lambda: jax.random.key(0),
        lambda: jax.random.split(jax.random.key(0), 3),
        lambda: jax.ShapeDtypeStruct((2,), "float32"),
        lambda: jnp.float32,
        lambda: [jnp.zeros(shape), 1],
    ]
    return rng.choice(ways)()


def hostile(rng: random.Random, library: str, argument: str) -> Any:
    """A value for an argument of this name; one that a call would wait for is left out."""
    draw = rng.random()
    if draw < 0.2:
        value: Any = rng.choice(NUMBERS)
    elif draw < 0.26:
        value = rng.choice(TEXTS)
    elif draw < 0.5:
        value = rng.choice(PYTHON)()
    elif draw < 0.75 or library == "numpy":
        value = from_numpy(rng)
    else:
        value = from_torch(rng) if library == "torch" else from_jax(rng)
    if argument == "f" and callable(value):  # what a function of the caller's raises is the caller's
        return None
    return 2**31 if "timeout" in argument and _waits(value) else value


def _waits(value: Any) -> bool:
    """Whether a call would wait long for a time of so many microseconds."""
    if isinstance(value, np.ndarray) and value.size != 1:
        return False
    try:
        if library_of(value) == "torch" and is_freed(value):  # torch ends the process when it reads one
            return False
        return bool(value > 10_000)
    except Exception:
        return False


def shown(x: Any) -> str:
    """A value in a few words."""
    try:
        if isinstance(x, (list, tuple)) and len(x) < 4 and all(type(e) in (int, float, str, bool) for e in x):
            return repr(x)
        if isinstance(x, (list, tuple)):
            return f"a {type(x).__name__} of {len(x)}: {', '.join(type(e).__name__ for e in list(x)[:3])}"
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return f"{type(x).__name__} {x.dtype}{list(x.shape)}"
        return repr(x)[:100]
    except Exception:
        return f"a {type(x).__name__}"


def libraries(names: list[str]) -> None:
    """Import what values are made of."""
    for name in names:
        __import__(name)
