"""Random programs of array ops, run by weft and by TensorFlow side by side.

    python tools/differential_tensor_array.py [--programs 2000] [--seed 0] [--arrays torch]

Needs a Python with TensorFlow. Prints every program on which the two differ, and ends with status 1 if one did. Where
weft differs on purpose (a refused call changes nothing; elements of an accumulator begin with what was prepended;
inputs that crash TensorFlow) the program ends or is not drawn.
"""

from __future__ import annotations

import argparse
import os
import random
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import arrays
import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
import numpy as np
import tensorflow as tf

import weft
from weft.tensor_array.storage import IN_BLOCKS, OTHER_SHAPE, READ, VALUE, WRITTEN

DTYPES = ["float32", "float64", "int32", "int64", "bool", "complex64", "float16", "string"]
DTYPES += ["bfloat16", "int8", "int16", "uint8", "uint16", "uint32", "uint64", "complex128"]
SHAPES = [(), (2,), (3,), (1, 2), (0, 2), (2, 2), (0,)]
PARTIAL = [None, None, None, (), (2,), (None,), (None, 2), (2, 2), (None, None)]


def draw_value(rng: random.Random, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A small value of `dtype`."""
    count = int(np.prod(shape))
    if dtype == "string":
        return np.array([rng.choice(["a", "b", "cd", ""]).encode() for _ in range(count)], object).reshape(shape)
    if dtype == "bool":
        return np.array([rng.random() < 0.5 for _ in range(count)], bool).reshape(shape)
    numbers = np.array([rng.randint(0 if dtype[0] == "u" else -8, 100) for _ in range(count)]).astype(dtype)
    if count and numbers.dtype.kind in "fc" and rng.random() < 0.1:
        numbers[rng.randrange(count)] = rng.choice([np.nan, np.inf, -0.0, 1e-40])
    return numbers.reshape(shape)


class Program:
    """One program: a forward array, its gradient arrays, and random calls on them, in both libraries."""

    def __init__(self, rng: random.Random, library: str) -> None:
        self.rng = rng
        self.library = library
        self.dtype = rng.choice(DTYPES)
        self.log: list[str] = []
        self.arrays: list[tuple[object, object, bool]] = []
        self.zero = np.float32(0)

    def both(self, op: str, ours: object, theirs: object, **arguments: object) -> str | None:
        """Call an op on both arrays; what differs, or None. `self.failed` says whether both refused."""
        self.log.append(f"{op} {self.index_of(ours)} {arguments}")
        results = []
        for library, handle in ((weft.raw_ops, ours), (tf.raw_ops, theirs)):
            given = dict(arguments) if handle is None else {"handle": handle, **arguments}
            if library is weft.raw_ops:
                given = {key: self.convert(key, value) for key, value in given.items()}
            try:
                results.append(getattr(library, op)(**given))
            except (weft.errors.OpError, tf.errors.OpError) as error:
                results.append(error)
        self.results = results
        return compare(*results)

    def convert(self, name: str, x: object) -> object:
        """An argument for weft: elements of the library, and what is read on the host of NumPy, too."""
        return x if name != "value" and self.rng.random() < 0.5 else arrays.convert(self.library, x)

    def index_of(self, handle: object) -> str:
        return next((f"array {i}" for i, a in enumerate(self.arrays) if a[0] is handle), "")

    def shape(self) -> tuple[int, ...]:
        """Mostly one shape, so that programs get far."""
        return self.usual if self.rng.random() < 0.75 else self.rng.choice(SHAPES)

    def place(self, ours: object, written: bool = False) -> int:
        """An index: mostly one that has, or has not, been written and read."""
        wanted = {VALUE | WRITTEN, VALUE | WRITTEN | IN_BLOCKS, VALUE | WRITTEN | OTHER_SHAPE} if written else {0}
        if ours.rules.is_gradient:
            wanted |= {WRITTEN}
        places = [i for i in range(ours.size) if (ours.storage.state(i) & ~(READ if written else 0)) in wanted]
        if places and self.rng.random() < 0.93:
            return self.rng.choice(places)
        return self.rng.randint(-1, ours.size + 1)

    def run(self, length: int) -> str | None:
        """What differed, or None."""
        rng = self.rng
        self.usual = rng.choice(SHAPES)
        size = rng.randint(0, 5)
        attributes = {
            "dtype": self.dtype,
            "element_shape": rng.choice([*PARTIAL, self.usual]),
            "dynamic_size": rng.random() < 0.4,
            "clear_after_read": rng.random() < 0.5,
            "identical_element_shapes": rng.random() < 0.3,
        }
        different = self.both("TensorArrayV3", None, None, size=np.int32(size), **attributes)
        if different:
            return different
        self.arrays.append((self.results[0].handle, self.results[1].handle, False))
        for _ in range(length):
            ours, theirs, is_gradient = rng.choice(self.arrays)
            different = self.step(ours, theirs, is_gradient)
            if different:
                return different
            # TensorFlow keeps the traces of a call it refuses; then the two may go apart.
            if isinstance(self.results[0], Exception) and self.leaves_traces:
                return None
        return None

    def step(self, ours: object, theirs: object, is_gradient: bool) -> str | None:
        rng, flow = self.rng, {"flow_in": self.zero}
        self.leaves_traces = False
        size = max(getattr(ours, "size", 0), 1)
        kind = rng.choices(
            ["write", "read", "gather", "scatter", "concat", "split", "size", "close", "gradient", "prepended"],
            [10, 6, 4, 4, 2, 2, 1, 0.3, 2, 1],
        )[0]
        dtype = self.dtype if rng.random() < 0.97 else rng.choice(DTYPES)
        if kind == "write":
            self.leaves_traces = ours.rules.is_dynamic
            value = draw_value(rng, dtype, self.shape())
            return self.both("TensorArrayWriteV3", ours, theirs, index=np.int32(self.place(ours)), value=value, **flow)
        if kind == "read":
            self.leaves_traces = self.dtype == "string"
            at = self.place(ours, written=True)
            return self.both("TensorArrayReadV3", ours, theirs, index=np.int32(at), dtype=dtype, **flow)
        if kind == "gather":
            self.leaves_traces = True
            indices = np.array([self.place(ours, written=True) for _ in range(rng.randint(0, 4))], np.int32)
            if rng.random() < 0.8:
                indices = np.unique(indices)
            elif rng.random() < 0.5:
                indices = np.arange(size, dtype=np.int32)
            shape = rng.choice([None, None, self.usual, rng.choice(PARTIAL)])
            return self.both(
                "TensorArrayGatherV3", ours, theirs, indices=indices, dtype=dtype, element_shape=shape, **flow
            )
        if kind == "scatter":
            self.leaves_traces = True
            indices = np.array([self.place(ours) for _ in range(rng.randint(0, 4))], np.int32)
            if rng.random() < 0.8:
                indices = np.unique(indices)
            value = draw_value(rng, dtype, (len(indices) + (rng.random() < 0.05), *self.shape()))
            return self.both("TensorArrayScatterV3", ours, theirs, indices=indices, value=value, **flow)
        if kind == "concat":
            if is_gradient and ours._split_count < 0:
                return None  # crashes TensorFlow
            self.leaves_traces = True
            shape = rng.choice([None, None, self.usual[1:]])
            return self.both("TensorArrayConcatV3", ours, theirs, dtype=dtype, element_shape_except0=shape, **flow)
        if kind == "split":
            self.leaves_traces = True
            lengths = np.array([rng.randint(0, 2) for _ in range(size)], np.int64)
            if rng.random() < 0.5:
                lengths[:] = rng.randint(0, 2)
            value = draw_value(rng, dtype, (int(lengths.sum()) + (rng.random() < 0.05), *self.usual[1:]))
            return self.both("TensorArraySplitV3", ours, theirs, value=value, lengths=lengths, **flow)
        if kind == "size":
            return self.both("TensorArraySizeV3", ours, theirs, **flow)
        if kind == "close":
            return self.both("TensorArrayCloseV3", ours, theirs)
        return self.gradient(ours, theirs, kind == "prepended")

    def gradient(self, ours: object, theirs: object, prepended: bool) -> str | None:
        self.leaves_traces = True
        arguments: dict[str, object] = {"flow_in": self.zero, "source": self.rng.choice(["g", "h"])}
        op = "TensorArrayGradV3"
        # With an unknown element shape weft demands what TensorFlow does not.
        if prepended and ours.element_shape is not None:
            op = "TensorArrayGradWithShape"
            arguments["shape_to_prepend"] = np.array(self.rng.choice([(), (2,), (0,), (1, 2)]), np.int32)
        different = self.both(op, ours, theirs, **arguments)
        if different or isinstance(self.results[0], Exception):
            return different
        self.arrays.append((self.results[0].grad_handle, self.results[1].grad_handle, True))
        return None


def compare(ours: object, theirs: object) -> str | None:
    """What differs between two results, or None."""
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        same = type(ours).__name__ == type(theirs).__name__
        return None if same else f"weft: {ours!r}\n  TensorFlow: {str(theirs)[:300]!r}"
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        if getattr(b, "dtype", None) == tf.resource or a is None:
            continue
        wanted = b.numpy()
        got = np.asarray(arrays.back(a))
        if (
            got.shape != np.shape(wanted)
            or not np.array_equal(got, wanted, equal_nan=got.dtype.kind in "fc")
            or (got.dtype != np.asarray(wanted).dtype and got.dtype != object)
        ):
            return f"weft: {got!r}\n  TensorFlow: {wanted!r}"
    return None


def flat(result: object) -> list[object]:
    """The fields of a result; nothing and an operation without output are the same."""
    if result is None or isinstance(result, tf.Operation):
        return []
    return list(result) if isinstance(result, tuple) else [result]


def main() -> int:
    """The number of programs on which the two differ, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--arrays", choices=arrays.LIBRARIES, default="numpy", help="what weft gets (default: numpy)")
    options = parser.parse_args()
    wrong = calls = 0
    for number in range(options.programs):
        program = Program(random.Random(f"{options.seed}/{number}"), options.arrays)
        different = program.run(options.length)
        calls += len(program.log)
        if different:
            wrong += 1
            print(f"program {number}:\n  " + "\n  ".join(program.log) + f"\n  {different}\n")
    print(f"{options.programs} programs, {calls} calls, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
