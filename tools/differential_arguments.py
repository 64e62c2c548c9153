"""Calls single ops with odd arguments, in weft and in a live TensorFlow, and compares the results and the classes of the errors.

    python tools/differential_arguments.py --cases 5000 --seed 1
    python tools/differential_arguments.py --seed 1 --case 1234
    python tools/differential_arguments.py --only RaggedGather
    python tools/differential_arguments.py --arrays torch

A case is a valid random call of which an argument or two are replaced (`draw_arguments.py`); weft gets its arrays in any strides.
With `--arrays` it gets tensors of torch or arrays of JAX, with gradients on or off, traced or mapped (`arrays.py`).
Both libraries run in a child process, because TensorFlow may abort or hang: such cases are counted. Known differences
(docs/differences.md) are recognised by `excuse`, and counted. The others are printed; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import arrays
import numpy as np
from draw_arguments import BATCHING, CALLS, Arguments, Built, draw, pick, strided
from excuses_arguments import comparable, excuse

#: Seconds after which a case counts as hung, the first one with the imports.
HUNG = 60.0
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2, "complex64": 1e-4, "complex128": 1e-9}


# ---- in the child process


def to_library(name: str, arguments: Arguments, rng: Any, library: str) -> Arguments:
    """The arguments as weft gets them; what it reads on the host, and what goes beside JAX, may also be of NumPy."""
    data = data_of(name)

    def convert(value: Any, name: str) -> Any:
        if isinstance(value, list):
            return [convert(v, name) for v in value]
        value = strided(rng, value)
        stays = rng.random() < (0.5 if name not in data else 0.2 if library == "jax" else 0.0)
        return value if stays or library == "numpy" else arrays.convert(library, value, rng)

    return {k: convert(v, k) for k, v in arguments.items()}


def data_of(name: str) -> list[str]:
    """The inputs of an op that are not read on the host."""
    import weft

    return [key for _, key, _, is_data in getattr(weft.raw_ops, name)._checks if is_data]


def way_of(name: str, rng: Any, library: str) -> Any:
    """A way to call an op; one that waits for other callers needs the values of its arrays."""
    is_known = name in BATCHING
    return pick(rng, [way for way in arrays.WAYS[library] if not is_known or way not in arrays.TRACED])


def call_weft(name: str, arguments: Arguments, rng: Any, library: str, way: Any) -> Any:
    import weft

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(v) for v in value]
        return arrays.convert(library, strided(rng, value), rng)

    def call(**given: Any) -> Any:
        given = {k: v.build(weft, convert) if isinstance(v, Built) else v for k, v in given.items()}
        with weft.scope(), weft.gradient_deadline(0.05):
            return getattr(weft.raw_ops, name)(**given)

    with weft.kernels.use("reference") if rng.random() < 0.3 else nullcontext():
        found = arrays.run(way, library, call, arguments, data_of(name))
    if any(arrays.is_of(library, x) for key in data_of(name) for x in flat(arguments.get(key))):
        made = [x for x in flat(found) if isinstance(x, np.ndarray) and all(x is not y for y in arguments.values())]
        strays = [x for x in made if library == "torch" or x.dtype.kind in "fc"]
        assert not strays, f"results of NumPy: {strays}"
    return found


def call_tensorflow(name: str, arguments: Arguments, library: str) -> Any:
    import tensorflow as tf

    def convert(value: Any) -> Any:
        if isinstance(value, Built):
            return value.build(tf, lambda v: convert(arrays.convert(library, v)))
        if isinstance(value, list):
            return [convert(v) for v in value]
        value = arrays.back(value)
        return tf.constant(value) if isinstance(value, np.ndarray | np.generic) else value

    given = {k: convert(v) for k, v in arguments.items()}
    if name.startswith("BatchNormWithGlobal"):
        return call_withdrawn(tf, name, given)
    return getattr(tf.raw_ops, name)(**given)


def call_withdrawn(tf: Any, name: str, given: Arguments) -> Any:
    """Call an op that TensorFlow runs only in graphs of old versions."""
    inputs = {k: v for k, v in given.items() if tf.is_tensor(v)}
    graph = tf.compat.v1.GraphDef()
    graph.versions.producer = 8
    for key, tensor in inputs.items():
        node = graph.node.add(name=key, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    node = graph.node.add(name="result", op=name, input=list(inputs))
    node.attr["T"].type = next(iter(inputs.values())).dtype.as_datatype_enum
    node.attr["variance_epsilon"].f = given["variance_epsilon"]
    node.attr["scale_after_normalization"].b = given["scale_after_normalization"]
    count = 5 if name.endswith("Grad") else 1
    with tf.Graph().as_default() as made:
        tf.import_graph_def(graph, name="")
        with tf.compat.v1.Session(graph=made) as session:
            feed = {f"{k}:0": v.numpy() for k, v in inputs.items()}
            found = session.run([f"result:{i}" for i in range(count)], feed)
    return found if count > 1 else found[0]


def outcome(call: Any, *arguments: Any) -> Any:
    """What a call returned, as a flat list of arrays, or its error."""
    try:
        found = call(*arguments)
    except Exception as error:
        return error
    return [plain(x) for x in flat(found)]


def flat(found: Any) -> Iterator[Any]:
    if isinstance(found, list | tuple):
        for part in found:
            yield from flat(part)
    elif found is not None:
        yield found


def plain(x: Any) -> Any:
    """A tensor as a NumPy array; of variants and handles only the shape."""
    if getattr(getattr(x, "dtype", None), "name", "") in ("variant", "resource"):
        return tuple(x.shape)
    x = arrays.back(x)
    if hasattr(x, "numpy") and not isinstance(x, np.ndarray):
        x = x.numpy()
    if isinstance(x, bytes):
        return np.array(x, object)
    if type(x).__module__.startswith("weft"):
        return tuple(getattr(x, "shape", ()))
    return np.asarray(x)


def serve(connection: Any, seed: int, numbers: list[int], only: str | None, library: str, against: str) -> None:
    """Run cases; send what weft did before TensorFlow is called, then what differs."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for number in numbers:
        rng = np.random.default_rng([seed, number])
        name = only or str(rng.choice(list(CALLS)))
        arguments = to_library(name, draw(rng, name), rng, library)
        way = way_of(name, rng, library)
        ours = outcome(call_weft, name, arguments, rng, library, way)
        connection.send((number, name, told(ours) if isinstance(ours, Exception) else f"answers {shown(arguments)}"))
        arguments = {k: [*map(arrays.back, v)] if isinstance(v, list) else arrays.back(v) for k, v in arguments.items()}
        if against == "numpy":
            theirs = outcome(call_weft, name, arguments, rng, "numpy", arrays.plain)
        else:
            theirs = outcome(call_tensorflow, name, arguments, library)
        connection.send((number, name, compare(name, arguments, ours, theirs, way)))
    connection.close()
    os._exit(0)


# ---- comparing


def compare(name: str, arguments: Arguments, ours: Any, theirs: Any, way: Any) -> tuple[str, str]:
    """("same" or "excused" or "differs", what)."""
    both_refuse = isinstance(ours, Exception) and isinstance(theirs, Exception)
    ours, theirs = (x if isinstance(x, Exception) else comparable(name, arguments, x) for x in (ours, theirs))
    problem = unlike_errors(ours, theirs) if both_refuse else unlike(name, ours, theirs)
    if problem is None:
        return "same", "refused by both" if both_refuse else "answered by both"
    if reason := excuse(name, arguments, ours, theirs):
        return "excused", reason
    return "differs", f"{way.__name__}, {shown(arguments)}\n  {problem}"


def unlike_errors(ours: Exception, theirs: Exception) -> str | None:
    """Errors of TensorFlow's Python layer are InvalidArgumentErrors of weft."""
    kind = type(theirs).__name__
    same = kind == type(ours).__name__ or kind in {c.__name__ for c in type(ours).__mro__}
    if kind in ("TypeError", "ValueError", "OverflowError"):
        same = same or "InvalidArgumentError" in {c.__name__ for c in type(ours).__mro__}
    return None if same else f"weft: {told(ours)}\n  TensorFlow: {told(theirs)}"


def unlike(name: str, ours: Any, theirs: Any) -> str | None:
    if isinstance(ours, Exception) or isinstance(theirs, Exception) or len(ours) != len(theirs):
        return f"weft: {told(ours)}\n  TensorFlow: {told(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not alike(a, b, "Norm" in name or "Grad" in name):
            return f"result {i}\n  weft: {told(a)}\n  TensorFlow: {told(b)}"
    return None


def alike(a: Any, b: Any, is_rounded: bool) -> bool:
    if isinstance(a, tuple) or isinstance(b, tuple):
        return isinstance(a, tuple) == isinstance(b, tuple) and a == b
    if a.shape != b.shape or (a.dtype != b.dtype and b.dtype != object):
        return False
    if b.dtype == object:
        return texts(a) == texts(b)
    if b.dtype.name in TOLERANCE:
        wide = np.complex128 if b.dtype.kind == "c" else np.float64
        exact = np.array_equal(a.astype(wide), b.astype(wide), equal_nan=True)
        return exact or (is_rounded and near(a.astype(wide), b.astype(wide), TOLERANCE[b.dtype.name]))
    return bool(np.array_equal(a, b, equal_nan=b.dtype.kind == "c"))


def texts(x: np.ndarray) -> list[Any]:
    return [v.encode() if isinstance(v, str) else v for v in x.ravel()]


def near(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    finite = np.abs(b[np.isfinite(b)])
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, finite.max(initial=0)), equal_nan=True)


def shown(arguments: Arguments) -> str:
    """The arguments; of large arrays dtype and shape."""

    def one(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(one, value))}]"
        if isinstance(value, np.ndarray) and value.size > 16:
            return f"{value.dtype}{list(value.shape)}"
        return " ".join(repr(value).split())

    return ", ".join(f"{key}={one(value)}" for key, value in arguments.items())


def told(x: Any) -> str:
    text = f"{type(x).__name__}: {x}" if isinstance(x, Exception) else f"{getattr(x, 'dtype', '')} {x!r}"
    return " ".join(text.split())[:300]


# ---- in the parent


def results(
    seed: int, numbers: list[int], only: str | None, library: str, against: str
) -> Iterator[tuple[int, str, Any]]:
    """The verdict on each case; a new child goes on where one ended."""
    context = multiprocessing.get_context("spawn")
    while numbers:
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=serve, args=(send, seed, numbers, only, library, against))
        child.start()
        send.close()
        number, name, did, done = numbers[0], "?", "", 0
        try:
            while done < len(numbers) and receive.poll(HUNG):
                number, name, verdict = receive.recv()
                if isinstance(verdict, str):
                    did = verdict
                else:
                    done, did = done + 1, ""
                    yield number, name, verdict
        except EOFError:
            pass
        child.kill()
        child.join()
        if done < len(numbers):
            yield numbers[done], name, ("died" if did else "differs", did or "weft ends the process or hangs")
        numbers = numbers[done + 1 :]


def main() -> int:
    """1 if there is a difference that is not listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run one case")
    parser.add_argument("--only", choices=list(CALLS), metavar="OP")
    parser.add_argument("--arrays", choices=arrays.LIBRARIES, default="numpy", help="what weft gets (default: numpy)")
    parser.add_argument("--against", choices=["tensorflow", "numpy"], default="tensorflow", help="numpy: weft on NumPy")
    options = parser.parse_args()
    seen: Counter[str] = Counter()
    by_op: Counter[str] = Counter()
    numbers = list(range(options.cases)) if options.case is None else [options.case]
    for number, name, (verdict, what) in results(options.seed, numbers, options.only, options.arrays, options.against):
        by_op[name] += 1
        if verdict == "died":
            what = "TensorFlow ends the process or hangs, weft " + (what if what.startswith("answers") else "refuses")
        if verdict == "differs" or "weft answers" in what:
            print(f"case {number}, {name}: {what}\n", flush=True)
        seen[verdict if verdict == "differs" else f"{verdict}: {what.split(' weft answers')[0]}"] += 1
    print("\n".join(f"{count} {what}" for what, count in sorted(seen.items())))
    print(", ".join(f"{name} {count}" for name, count in sorted(by_op.items())))
    return int(seen["differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
