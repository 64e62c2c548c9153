"""Draws random programs of concurrent calls of the batching family, in the form of the cases of tests/recorded/batching.json.

A program of the op `Pipeline` has callers that go through Batch, a model and Unbatch, and perhaps the way back. What is known to
hang or abort TensorFlow is not drawn: batches whose dtypes differ, broken Batch batches, negative sizes, absent gradients.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

Program = dict[str, Any]

DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int32",
    "int64",
    "uint8",
    "int16",
    "bool",
    "complex64",
    "string",
]
GAPS = [0.04, 0.04, 0.04, 0.06, 0.15, 0.35]
TIMEOUTS = [0, 100_000, 150_000, 200_000, 300_000, 500_000]
#: Attributes with which no resource can be made.
BAD_ATTRS = [
    {"max_batch_size": 0},
    {"max_batch_size": -3},
    {"batch_timeout_micros": -1},
    {"batch_timeout_micros": 1 << 31},
    {"allowed_batch_sizes": [4, 2, 8]},
    {"allowed_batch_sizes": [1, 1000]},
]


def tensor(rng: Random, rows: int, trailing: list[int], dtype: str, first: int) -> dict[str, Any]:
    """A tensor whose values count on from `first`, so that every row can be told from the others."""
    shape = [rows, *trailing]
    count = np.arange(first, first + int(np.prod(shape)))
    if dtype == "string":
        values = np.array([f"s{i}" for i in count.tolist()], object)
    elif dtype == "bool":
        values = np.array([rng.random() < 0.5 for _ in count], bool)
    else:
        values = (count % 200).astype(np.float64 if dtype[0] in "fbc" else np.int64)
    return {"dtype": dtype, "shape": shape, "values": values.reshape(shape).tolist()}


def scalar(value: int, dtype: str = "int64") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [], "values": value}


def sizes(rng: Random, largest: int) -> list[int]:
    """Allowed batch sizes that end with the largest, or none."""
    if rng.random() < 0.5:
        return []
    smaller = sorted(rng.sample(range(1, largest), min(largest - 1, rng.choice([0, 1, 2])))) if largest > 1 else []
    return [*smaller, largest]


def limits(rng: Random) -> dict[str, Any]:
    """Attributes of a queue."""
    most = rng.randint(1, 8)
    drawn = {
        "num_batch_threads": rng.choice([1, 1, 2, 3]),
        "max_batch_size": most,
        "batch_timeout_micros": rng.choice(TIMEOUTS),
    }
    if rng.random() < 0.4:
        drawn["max_enqueued_batches"] = rng.choice([-1, 0, 1, 1, 2, 3])
    if allowed := sizes(rng, most):
        drawn["allowed_batch_sizes"] = allowed
    return drawn


def rows_of(rng: Random, most: int) -> int:
    """The rows of a call: mostly few, sometimes none, sometimes one too many."""
    return rng.choice([0, most, most + 1]) if rng.random() < 0.12 else rng.randint(1, max(1, min(most, 4)))


def spread(rng: Random, invocations: list[dict[str, Any]]) -> None:
    """Put pauses between the calls."""
    for invocation in invocations[1:]:
        invocation["after_previous_s"] = rng.choice(GAPS)


def spoil(rng: Random, tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tensors of a call, the last of them made such that it is refused: a scalar, or a row too many."""
    *others, last = tensors
    if others and rng.random() < 0.5:
        rows, *trailing = last["shape"]
        return [*others, tensor(rng, rows + 1, trailing, last["dtype"], 0)]
    return [*others, {"dtype": last["dtype"], "shape": [], "values": "s" if last["dtype"] == "string" else 1}]


class Places:
    """The resources and queues of a program, each with its limits and the types of its tensors."""

    def __init__(self, rng: Random, types: Any) -> None:
        self.rng = rng
        self.types = types
        names = rng.sample(["a", "b", "c"], rng.choice([1, 1, 1, 2]))
        containers = rng.sample(["", "x", "localhost"], rng.choice([1, 1, 1, 2]))
        self.limits = {(name, container): limits(rng) for name in names for container in containers}
        self.queues = rng.choice([[""], [""], ["", "q"], ["p", "q"]])
        self.signatures: dict[Any, list[tuple[str, list[int]]]] = {}

    def draw(self) -> tuple[dict[str, Any], list[tuple[str, list[int]]]]:
        """The attributes of a call somewhere, and the types of its tensors."""
        rng = self.rng
        (name, container), given = rng.choice(list(self.limits.items()))
        attrs = {"shared_name": name, **given}
        if container:
            attrs["container"] = container
        if queue := rng.choice(self.queues):
            attrs["batching_queue"] = queue
        signature = self.signatures.setdefault((name, container, queue), self.types(rng))
        return attrs, signature


def mixed_types(rng: Random) -> list[tuple[str, list[int]]]:
    """One to three tensors of any type."""
    return [(rng.choice(DTYPES), rng.choice([[], [], [2], [2, 3], [0]])) for _ in range(rng.choice([1, 1, 2, 3]))]


def draw_batch(rng: Random) -> Program:
    """Calls of Batch."""
    places = Places(rng, mixed_types)
    invocations = []
    for i in range(rng.randint(2, 7)):
        attrs, types = places.draw()
        rows = rows_of(rng, attrs["max_batch_size"])
        tensors = [tensor(rng, rows, trailing, dtype, 20 * i) for dtype, trailing in types]
        if rng.random() < 0.06:
            tensors = spoil(rng, tensors)
        attrs = disturb(rng, attrs, [{"num_batch_threads": 0}, {"num_batch_threads": -1}])
        invocations.append({"in_tensors": tensors, "attrs": attrs})
    return {"op": "Batch", "mode": "concurrent", "attrs": {"grad_timeout_micros": 0},
            "invocations": invocations}  # fmt: skip


def disturb(rng: Random, attrs: dict[str, Any], more: list[dict[str, Any]]) -> dict[str, Any]:
    """The attributes, now and then with others than the creator's, or impossible ones, perhaps for a resource of its own."""
    chance = rng.random()
    if chance < 0.06:
        return {**attrs, **rng.choice(BAD_ATTRS + more)}
    if chance < 0.09:
        return {**attrs, **rng.choice(BAD_ATTRS + more), "shared_name": "bad"}
    if chance < 0.15:
        return {**attrs, **limits(rng)}
    return attrs


# --- BatchFunction ---

NUMBERS = ["float32", "float32", "float64", "int32", "int64"]
#: The functions whose outputs' rows depend on the same rows of the inputs alone.
ROW_WISE = ["add100", "negate", "identity", "two_args_add", "double_and_join", "times0_plus_capture"]
WRONG = ["sum_all", "twice_the_rows", "identity_and_sum", "square_ones", "fail_if_any_ge5"]


def draw_function(rng: Random) -> Program:
    """Calls of BatchFunction: with splitting, padding policies, slow functions, and such that fail or return the wrong thing."""
    f = rng.choice(ROW_WISE * 3 + WRONG)
    dtype = rng.choice(NUMBERS) if f != "fail_if_any_ge5" else "float32"
    places = Places(rng, lambda rng: function_types(rng, f, dtype))
    more = {key: function_options(rng, given) for key, given in places.limits.items()}
    slow = rng.random() < 0.25
    invocations = []
    for i in range(rng.randint(2, 6)):
        attrs, types = places.draw()
        attrs.update(more[attrs["shared_name"], attrs.get("container", "")])
        if slow and (attrs["num_batch_threads"] <= 0 or attrs.get("enable_large_batch_splitting")):
            attrs["num_batch_threads"] = 1
        invocations.append(function_call(rng, f, dtype, i, attrs, types))
    program = {"op": "BatchFunction", "mode": "concurrent", "f": f, "attrs": {}, "invocations": invocations}
    if slow:
        program["function_sleep_s"] = rng.choice([0.11, 0.17, 0.26])
    return program


def function_types(rng: Random, f: str, dtype: str) -> list[tuple[str, list[int]]]:
    trailing = rng.choice([[], [], [2]])
    if f == "double_and_join":
        return [(dtype, trailing), ("string", rng.choice([[], [2]]))]
    return [(dtype, trailing)] * (2 if f == "two_args_add" else 1)


def function_options(rng: Random, given: dict[str, Any]) -> dict[str, Any]:
    """Attributes that Batch does not have, and others that mean something else here."""
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["enable_large_batch_splitting"] = True
        if rng.random() < 0.5:  # smaller batches than calls
            most = rng.randint(1, given["max_batch_size"])
            options["allowed_batch_sizes"] = sizes(rng, most) or [most]
        if given.get("max_enqueued_batches") == 0 and rng.random() < 0.8:
            options["max_enqueued_batches"] = 4
    if rng.random() < 0.4:
        options["batch_padding_policy"] = rng.choice(["BATCH_DOWN", "BATCH_DOWN", "MINIMIZE_TPU_COST_PER_REQUEST"])
    if rng.random() < 0.15:
        options["num_batch_threads"] = rng.choice([0, -1])
        if rng.random() < 0.2:
            options["allowed_batch_sizes"] = [rng.randint(1, given["max_batch_size"])]
    if rng.random() < 0.1:
        options["low_priority_max_batch_size"] = 4
    return options


def function_call(
    rng: Random, f: str, dtype: str, i: int, attrs: dict[str, Any], types: list[tuple[str, list[int]]]
) -> dict[str, Any]:
    rows = rows_of(rng, attrs["max_batch_size"])
    if rng.random() < 0.3:
        rows = rng.randint(1, attrs["max_batch_size"])
    first = rng.randint(0, 3) if f == "fail_if_any_ge5" else 20 * i
    if rng.random() < 0.05:  # does not fit the others of its batch
        types = [(t, [3]) for t, _ in types]
    tensors = [tensor(rng, rows, trailing, t, first) for t, trailing in types]
    if rng.random() < 0.05:
        tensors = spoil(rng, tensors)
    call: dict[str, Any] = {"in_tensors": tensors}
    if f == "times0_plus_capture":
        call["captured_tensors"] = [scalar(7 if rng.random() < 0.95 else 8, dtype)]
    chance = rng.random()
    if chance < 0.03:
        # Alone: TensorFlow aborts where the calls of a batch want different numbers of outputs.
        attrs = {**attrs, "Tout": rng.choice([["int8"], [dtype, dtype, dtype]]), "shared_name": f"wrong {i}"}
    elif chance < 0.05 and f == "add100":
        call["f"] = "negate"
    call["attrs"] = disturb(rng, attrs, [{"batch_padding_policy": "NOPE"}, {"max_enqueued_batches": 0}])
    if call["attrs"]["max_batch_size"] < 0:
        call["attrs"]["max_batch_size"] = 0  # TensorFlow dies of negative ones with splitting
    return call


# --- Unbatch and UnbatchGrad ---


def index_of(rows: list[list[int]]) -> dict[str, Any]:
    return {"dtype": "int64", "shape": [len(rows), 3], "values": rows}


def pieces(rng: Random, ids: list[int]) -> tuple[list[list[int]], int]:
    """An index whose pieces follow each other, with their lengths; sometimes listed in another order, or with gaps."""
    rows, at = [], 0
    for id in ids:
        length = rng.choice([0, 1, 1, 2, 3])
        rows.append([id, at, length])
        at += length
    if rng.random() < 0.2:
        rng.shuffle(rows)
    if rng.random() < 0.1:
        gap = rng.randint(1, 2)
        rows, at = [[id, start + gap, length] for id, start, length in rows], at + gap
    return rows, at


def draw_unbatch(rng: Random) -> Program:
    """Owners and waiters: of whole batches, each call in any order, some lost and some twice; or of a few ids at random."""
    dtype, trailing = rng.choice(DTYPES), rng.choice([[], [2], [2, 2]])
    timeout = rng.choice([-1000, 0, 100_000, 200_000, 300_000, 500_000, 500_000, 500_000])
    names = rng.choice([["u"], ["u"], ["u", "v"]])
    pool = rng.sample([1, 2, 3, 4, 5, 6, -7, 1 << 40], rng.randint(2, 8))
    if rng.random() < 0.7:
        calls = whole_batches(rng, pool, dtype, trailing, names)
    else:
        calls = []
        for i in range(rng.randint(2, 8)):
            make = owner if rng.random() < 0.4 else waiter
            calls.append(make(rng, rng.choice(pool), pool, dtype, trailing, i))
            calls[-1]["attrs"] = {"shared_name": rng.choice(names)}
    for call in calls:
        call["attrs"]["timeout_micros"] = rng.choice([0, 200_000]) if rng.random() < 0.04 else timeout
    return {"op": "Unbatch", "mode": "concurrent", "attrs": {}, "invocations": calls}


def whole_batches(
    rng: Random, ids: list[int], dtype: str, trailing: list[int], names: list[str]
) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    while ids:
        count = rng.randint(1, 4)
        batch, ids = ids[:count], ids[count:]
        group = [owner(rng, batch[0], batch, dtype, trailing, len(calls), whole=True)]
        for id in batch[1:]:
            group += [waiter(rng, id, batch, dtype, trailing, 0)] * rng.choice([0, 1, 1, 1, 1, 1, 1, 1, 1, 2])
        name = rng.choice(names)
        calls += [{**call, "attrs": {"shared_name": name}} for call in group]
    rng.shuffle(calls)
    return calls


def owner(
    rng: Random, id: int, pool: list[int], dtype: str, trailing: list[int], i: int, whole: bool = False
) -> dict[str, Any]:
    """A call that has a batch of `pool`, or of some of it."""
    others = [x for x in pool if x != id]
    others = others if whole else rng.sample(others, rng.randint(0, min(3, len(others))))
    listed = [*others, id] if rng.random() < 0.9 or not others else others
    rng.shuffle(listed)
    if rng.random() < 0.03:
        listed.append(rng.choice(listed))
    index, rows = pieces(rng, listed)
    rows = max(rows, len(index)) + rng.choice([0, 0, 0, 1, 2])
    if rng.random() < 0.05:
        rows = rng.randint(1, rows)  # too few
    call = {
        "batched_tensor": tensor(rng, rows, trailing, dtype, 20 * i),
        "batch_index": index_of(index),
        "id": scalar(id),
    }
    if rng.random() < 0.03:
        call["id"] = {"dtype": "int64", "shape": [1], "values": [id]}
    elif rng.random() < 0.03:
        call["batch_index"] = {"dtype": "int64", "shape": [1, 2], "values": [[id, 0]]}
    return call


def waiter(rng: Random, id: int, pool: list[int], dtype: str, trailing: list[int], i: int) -> dict[str, Any]:
    """A call that waits for its piece."""
    if rng.random() < 0.05:
        dtype = "int32" if dtype != "int32" else "float32"
    if rng.random() < 0.1:
        trailing = [3]
    rows = 0 if rng.random() < 0.9 else 2
    return {"batched_tensor": tensor(rng, rows, trailing, dtype, 20 * i), "batch_index": index_of([]), "id": scalar(id)}


GRADIENTS = ["float32", "float64", "float16", "bfloat16", "int32", "complex64", "string"]


def draw_gradient(rng: Random) -> Program:
    """Whole batches of gradients, mixed; an owner's rows are all sent, in any order."""
    dtype, names = rng.choice(GRADIENTS), rng.choice([["g"], ["g"], ["g", "h"]])
    ids = list(range(1, 12))
    rng.shuffle(ids)
    calls: list[dict[str, Any]] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        name, count = rng.choice(names), rng.randint(1, 4)
        batch, ids = ids[:count], ids[count:]
        calls += gradient_batch(rng, batch, dtype, name, 20 * len(calls))
    rng.shuffle(calls)
    return {"op": "UnbatchGrad", "mode": "concurrent", "attrs": {}, "invocations": calls}


def gradient_batch(rng: Random, ids: list[int], dtype: str, name: str, first: int) -> list[dict[str, Any]]:
    trailing = rng.choice([[], [2], [2, 2]])
    index, total = pieces(rng, ids)
    owner = rng.choice(ids)
    calls = []
    for at, (id, _, length) in enumerate(index):
        if rng.random() < 0.04:
            length += 1  # not what the index says
        call = {
            "original_input": tensor(rng, 0, [2], dtype, 0),
            "batch_index": index_of([]),
            "grad": tensor(rng, length, trailing, dtype, first + 20 * at),
            "id": scalar(id),
            "attrs": {"shared_name": name},
        }
        if id == owner:
            call["original_input"] = tensor(rng, max(1, total), rng.choice([[], [2]]), dtype, 0)
            call["batch_index"] = index_of(spoiled(rng, index))
        elif rng.random() < 0.1:
            call["batch_index"] = index_of(index)  # a sender's index is not looked at
        calls.append(call)
        if rng.random() < 0.05:
            calls.append(call | {"grad": tensor(rng, length, trailing, dtype, 5)})
    if rng.random() < 0.05:
        calls[-1] = calls[-1] | {"id": {"dtype": "int64", "shape": [1], "values": [calls[-1]["id"]["values"]]}}
    return calls


def spoiled(rng: Random, index: list[list[int]]) -> list[list[int]]:
    """The index of an owner, now and then empty or with an id twice."""
    chance = rng.random()
    return [] if chance < 0.03 else [*index, index[0]] if chance < 0.06 else index


# --- Batch, a model, Unbatch, and back ---


def draw_pipeline(rng: Random) -> Program:
    """Callers that each go through Batch, a model and Unbatch; with a gradient, back through UnbatchGrad and Unbatch."""
    with_gradient = rng.random() < 0.4
    dtype = rng.choice(["float32", "float64"])
    model = "square" if with_gradient else rng.choice(["square", "two_outputs", "add100", "fail_if_any_ge5"])
    first = limits(rng)
    trailing = rng.choice([[], [2]])
    most = first["max_batch_size"]
    invocations = []
    for i in range(rng.randint(2, 6)):
        rows = most + 1 if rng.random() < 0.04 else rng.randint(1, most)
        start = 0 if model == "fail_if_any_ge5" else 1 + 20 * i
        invocations.append({"in_tensors": [tensor(rng, rows, trailing, dtype, start)]})
    return {
        "op": "Pipeline",
        "mode": "concurrent",
        "model": model,
        "gradient": with_gradient,
        "attrs": {
            "Batch": {**first, "grad_timeout_micros": 0, "shared_name": "b"},
            "Unbatch": {"timeout_micros": rng.choice([300_000, 400_000])},
        },
        "invocations": invocations,
    }


DRAW = {
    "Batch": draw_batch,
    "BatchFunction": draw_function,
    "Unbatch": draw_unbatch,
    "UnbatchGrad": draw_gradient,
    "Pipeline": draw_pipeline,
}
