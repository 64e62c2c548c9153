"""Random combinations of the options and the calls of `weft.batched`, and what each call gives by itself.

A `Case` is drawn from a seed: options, a function, and what its callers do. The function is `x * x * w * scale` in whole numbers,
so that results and gradients are exact in every order of additions.
"""

from __future__ import annotations

import random
import time
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import weft
from weft import RaggedTensor

PATIENCE = 30.0


class Bad(ValueError):
    """What the function raises of a batch with a bad row."""


@dataclass
class Record:
    """A result as a dataclass."""

    y: Any = None
    t: Any = None
    label: Any = None
    per: Any = None
    note: Any = None
    n: Any = None


class Named(NamedTuple):
    """A result as a named tuple."""

    y: Any = None
    t: Any = None
    label: Any = None
    per: Any = None
    note: Any = None
    n: Any = None


NAMES = Named._fields
#: Structures around an argument: how to make and how to open them.
WRAPS = {
    "bare": (lambda x: x, lambda x: x),
    "dict": (lambda x: {"x": x}, lambda x: x["x"]),
    "list": (lambda x: [x], lambda x: x[0]),
    "dataclass": (lambda x: Record(y=x), lambda x: x.y),
    "named": (lambda x: Named(y=x, note="note"), lambda x: x.y),
}
#: Structures of results, of and to a dict of their parts.
RESULTS = {
    "array": (lambda parts: parts["y"], lambda y: {"y": y}),
    "dict": (dict, dict),
    "tuple": (lambda parts: tuple(parts[name] for name in NAMES), lambda y: dict(zip(NAMES, y, strict=True))),
    "dataclass": (lambda parts: Record(**parts), lambda y: dict(vars(y))),
    "named": (lambda parts: Named(**parts), Named._asdict),
}


def plain(x):
    """An array, a RaggedTensor or items as nested lists."""
    if isinstance(x, (list, RaggedTensor)):
        return [plain(each) for each in x]
    return x.tolist() if hasattr(x, "tolist") else x


def values_of(x):
    return getattr(x, "flat_values", x)


class Case:
    """One combination. Its calm ones have no callers that leave, come late or drop their results."""

    def __init__(self, seed, library=None):
        self.seed, dice = seed, random.Random(seed)
        self.dice, often = dice, lambda chance: dice.random() < chance
        self.often = often
        self.library = library = library or dice.choice(["numpy", "numpy", "torch", "torch", "torch", "jax"])
        self.gradient = library == "torch" and often(0.8)
        self.traced = library == "jax" and often(0.7)
        self.vjp = library == "numpy" and often(0.3)
        kinds = ["result", "result", "coroutine", "generator", "async_generator"]
        self.kind = dice.choice(["result"] if self.traced or self.vjp else kinds[:3] if self.gradient else kinds)
        self.streams, self.replays = "gen" in self.kind, often(0.1)
        calm = self.replays or often(0.3)
        self.length, self.rows = dice.choice(["plain", "plain", "pad", "ragged"]), often(0.8)
        self.wrap, self.result = dice.choice(["bare", *WRAPS]), dice.choice(list(RESULTS))
        self.method, self.has_z = often(0.2), often(0.4)
        self.updates, self.closes = (not calm and often(chance) for chance in (0.3, 0.15))
        self.leaves, self.lates, self.drops = (not calm and often(chance) for chance in (0.6, 0.3, 0.3))
        self.finalizes = (
            not calm and library != "jax" and often(0.2)
        )  # finalizers inside a trace of JAX would be traced
        self.delay, self.chunks = dice.choice([0, 0, 0.0005, 0.003]), dice.randint(1, 4)
        self.options = self.draw_options(calm)
        self.misses = self.leaves or self.lates or self.drops or self.closes or self.finalizes
        self.has_items = "items" in self.options
        self.bad_rate = 0 if self.traced and not self.has_items else dice.choice([0, 0, 0.1, 0.3])
        self.parts = {"y", *(name for name in ("t", "label", "per", "note", "n") if often(0.4))}
        self.parts -= {"per"} if self.vjp or self.traced else set()
        self.parts -= set() if "pass_lengths" in self.options else {"n"}
        if self.result == "array":
            self.parts = {"y"}
        self.calls_each = dice.randint(1, 5)
        self.threads, self.tasks = dice.randint(1, 6), 0 if self.traced else dice.choice([0, 0, 2, 5])
        self.parameter = self.function = None  # set when it runs
        self.references = []  # to all arrays of the callers

    def draw_options(self, calm):
        dice, often = self.dice, self.often
        drawn = {
            "max_wait": (0.4, [0.002, 0.02]), "max_queue": (0 if calm else 0.2, [0, 3, 10]), "deadline": (0.2, [50.0]),
            "parallel": (0.3, [2, 3]), "allowed_batch_sizes": (0.3, [[64], [2, 4, 64], [3, 7, 64, 100]]),
            "pass_mask": (0.2, ["mask"]), "pass_rows": (0.2, ["rows"]), "items": (0.3, [("tag",)]),
            "key": (0.2, [lambda *_, scale="s1", **__: scale == "s1"]), "rows": (not self.rows, [False]),
            "cost": (0.2, [lambda *_, scale="s1", **__: 0.5 + len(str(scale)) / 2]), "on_error": (0.3, ["share"]),
            "shared": (self.traced or 0.3, [("w",)]), "on_missing_gradient": (0.5, ["zero"]),
            "gradient_deadline": (1, [PATIENCE, PATIENCE, PATIENCE if calm else 1.0]),
            "wait_backward": (0.3, [False]), "recompute": (0.15 * (self.gradient and self.kind == "result"), [True]),
            "on_loop": (0.3 * (self.kind == "result"), [True]), "vjp": (self.vjp, [self.with_pull_back]),
            "ragged": (self.length == "ragged", [("data",)]),
            "pad": (self.length == "pad", [{"data": weft.Pad(multiple_of=4)}, {"data": weft.Pad(sizes=(2, 8))}]),
            "device": (0.15 * (self.library != "jax" and self.kind == "result" and not (self.vjp or self.method)), ["cpu"]),
        }  # fmt: skip
        options = {"max_batch_size": dice.choice([4, 5, 8, 64])}
        options |= {name: dice.choice(values) for name, (chance, values) in drawn.items() if often(chance)}
        if "max_wait" in options and often(0.5):
            options["min_batch_size"] = dice.randint(1, 4)
        if "cost" not in options and not (self.streams or self.traced) and often(0.3):
            options["split"] = True
        if {"parallel", "device"} & options.keys():
            options.pop("on_loop", None)
        if "pad" in options:
            options["cut"] = {"array": True, "tuple": 0}.get(self.result, "y")
            options |= {name: value for name, value in {"max_waste": 0.3, "pass_lengths": "n"}.items() if often(0.4)}
        return options

    # --- the function ---

    def compute(self, k, data, z, tag, w, scale, mask, rows, n):
        """The result for a batch; of a stream its chunk `k`."""
        if k == 0:
            time.sleep(self.delay)
        x, w = WRAPS[self.wrap][1](data), self.parameter if w is None else w
        if mask is not None and rows is not None:
            assert plain(mask) == [i < rows for i in range(len(x))]
        if (tag is not None and "bad" in tag) or (not self.traced and (values_of(x) == -1).any()):
            raise Bad("a bad row")
        t = x.sum() if self.length == "ragged" else x.sum(1)
        per = [x[i] * w for i in range(len(x))] if self.length == "plain" else [{"a": 7}] * len(x)
        found = {
            "y": x * x * w * int(scale[1]) * (k + 1), "t": t * w + (0 if z is None else z), "per": weft.PerRow(per), "n": n,
            "label": [f"row {each}" for each in tag] if tag is not None else ["row"] * len(x),
            "note": weft.Shared({"scale": scale}),
        }  # fmt: skip
        return RESULTS[self.result][0]({name: found[name] if name in self.parts else None for name in NAMES})

    def with_pull_back(self, *args, z=None, w=None, scale="s1", **more):
        x = WRAPS[self.wrap][1](args[-1])
        factor = self.parameter if w is None else w

        def pull_back(gradient):
            parts = RESULTS[self.result][1](gradient)
            dx = 2 * values_of(x) * factor * int(scale[1]) * values_of(parts["y"])
            dz = parts["t"] if "t" in self.parts else np.zeros(len(x))
            dx = dx + factor * (np.repeat(dz, x.row_lengths()) if self.length == "ragged" else dz[:, None])
            return (dx,) if z is None else (dx, dz)

        return self.function(*args, z=z, w=w, scale=scale, **more), pull_back

    # --- calls ---

    def draw_call(self, caller, number, dice, is_task):
        often, few = lambda chance: dice.random() < chance, self.library == "jax"
        most = 2 if few else 9 if "split" in self.options else 3
        count = dice.randint(1 if few else 0, most) if self.rows else 1
        is_dense = self.length != "ragged" or not self.rows or few or often(0.5)
        length = 3 if self.length == "plain" else dice.randint(2, 3) if few else dice.randint(0, 5)
        lengths = [length if is_dense else dice.randint(0, 5) for _ in range(count)]
        rows = [[float(dice.randint(1, 50)) for _ in range(each)] for each in lengths]
        is_bad = bool(rows and rows[-1]) and often(self.bad_rate)
        tags = [f"{caller}/{number}/{i}" for i in range(count)]
        if is_bad and self.has_items:
            tags[-1] = "bad"
        elif is_bad:
            rows[-1][-1] = -1.0
        return SimpleNamespace(
            case=self, caller=caller, is_task=is_task, rows=rows, length=length, is_dense=is_dense, is_bad=is_bad, tags=tags,
            z=[float(dice.randint(1, 30)) for _ in rows], scale=dice.choice(["s1", "s1", "s2"]), g=float(dice.randint(1, 3)),
            mode="grad" if is_task else dice.choice(["grad", "grad", "grad", "no_grad", "inference_mode"]),
            is_refused=not self.replays and often(0.03), is_low=often(0.2), is_plain=often(0.3) and not self.replays,
            deadline=dice.choice([0.0005, 0.005]) if self.lates and often(0.2) else None, goes_back=not (self.drops and often(0.2)),
            is_computed=often(0.2), leaf=None, state="",
        )  # fmt: skip

    def array(self, values, shape):
        """An array of the case's library, which must not outlive the case."""
        made = np.array(values, np.float32 if self.library == "jax" else float).reshape(shape)
        if self.library == "torch":
            import torch

            made = torch.from_numpy(made)
        elif self.library == "jax":
            import jax.numpy as jnp

            made = jnp.asarray(made)
        self.references.append(weakref.ref(made))
        return made

    def arguments(self, call, x=None, w=None):
        """The arguments of a call; `x` and `w` may be tracers of JAX."""
        if x is None:
            shape = (call.length,) if not self.rows else (len(call.rows), call.length) if call.is_dense else (-1,)
            x = self.array([each for row in call.rows for each in row], shape)
            if self.gradient and call.mode == "grad":
                call.leaf = x.requires_grad_()
                x = x * 1 if call.is_computed and not call.is_task and self.waits else x
        if not call.is_dense:
            x = RaggedTensor.from_row_lengths(x, np.array([len(row) for row in call.rows], int))
        named = {"scale": bytearray() if call.is_refused else call.scale}  # an argument that is not hashable is refused
        if self.has_z:
            named["z"] = self.array(call.z, (len(call.rows),)) if self.rows else call.z[0]
        if self.has_items:
            named["tag"] = call.tags if self.rows else call.tags[0]
        if "shared" in self.options:
            named["w"] = self.parameter if w is None else w
        return (WRAPS[self.wrap][0](x),), named

    @property
    def waits(self):
        return self.options.get("wait_backward", True)

    def check(self, call, result, k=0):
        """Compare a result with what the call gives by itself; return its parts."""
        z = call.z if self.has_z else [0] * len(call.rows)
        per = [[v * 2 for v in row] if self.length == "plain" else {"a": 7} for row in call.rows]
        want = {
            "y": [[v * v * 2 * int(call.scale[1]) * (k + 1) for v in row] for row in call.rows],
            "t": [sum(row) * 2 + own for row, own in zip(call.rows, z, strict=True)], "n": [call.length] * len(call.rows),
            "label": [f"row {tag}" if self.has_items else "row" for tag in call.tags], "per": per,
        }  # fmt: skip
        want = want if self.rows else {name: value[0] for name, value in want.items()}
        want["note"] = {"scale": call.scale}
        parts = RESULTS[self.result][1](result)
        for name, part in parts.items():
            assert plain(part) == (want[name] if name in self.parts else None), name
            if hasattr(part, "shape") and not isinstance(part, (RaggedTensor, np.generic)):
                self.references.append(weakref.ref(part))
        assert not call.is_bad
        assert not call.is_refused
        return parts

    def gradients(self, call):
        """The gradients of `x`, flat, and of `w`, for a loss of `g` times the sum of the result."""
        more = ("t" in self.parts) + ("per" in self.parts and self.length == "plain")
        flat, s = [v for row in call.rows for v in row], int(call.scale[1])
        return [call.g * (4 * v * s + 2 * more) for v in flat], call.g * sum(v * v * s + more * v for v in flat)

    def loss(self, call, parts):
        total = values_of(parts["y"]).sum()
        if "t" in self.parts:
            total = total + parts["t"].sum()
        if "per" in self.parts and self.length == "plain":
            total = total + sum(each.sum() for each in (parts["per"] if self.rows else [parts["per"]]))
        return total * call.g
