"""Writes docs/ops.md, the table of all ops, from the op table itself; with `--check` it says whether the file is up to date."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from support import gradient_cases  # noqa: E402

from weft import aio, kernels, raw_ops  # noqa: E402
from weft.core.op import TABLE, Op  # noqa: E402
from weft.kernels.choice import KERNELS  # noqa: E402

TARGET = ROOT / "docs" / "ops.md"
HEADING = """# The ops

Every op is `weft.raw_ops.<name>`; arguments come by keyword or, in TensorFlow's order, by position. An attribute shown with `=` has
that default. An op that waits for other callers exists as `await weft.aio.<name>(...)`, too. A gradient is what `weft.vjp` and
the frameworks use; its orders are those tested in every framework named (`tests/test_*gradients.py`), and `jit` says that it
compiles under `jax.jit`. [gradients.md](gradients.md) says which gradient it is. Kernels: each in the modules that have it; the
array in hand decides which one runs (`weft.kernels.which`).

This file is written by `tools/ops_table.py`.

| op | inputs | attributes | outputs | gradient | orders | frameworks | waits for others | kernels |
|---|---|---|---|---|---|---|---|---|
"""


def table() -> str:
    """The text of docs/ops.md."""
    public = [op for op in TABLE.values() if getattr(raw_ops, op.name, None) is op]
    return HEADING + "".join(map(row, public))


def row(op: Op) -> str:
    """The line of one op."""
    attributes = [p for p in op.signature.parameters.values() if p.name not in op.inputs]
    found = sorted(kernels_of(op.function, set()))
    cells = [
        f"**{op.name}**",
        listed(op.inputs),
        listed(p.name if p.default is p.empty else f"{p.name}={shown(p.default)}" for p in attributes),
        listed(op.outputs),
        "nothing flows" if op.name in gradient_cases.CONSTANT else yes(op.gradient is not None),
        str(gradient_cases.orders_of(op.name) or ""),
        frameworks(op.name),
        yes(op.name in aio.__all__),
        ", ".join(f"`{name}` ({', '.join(modules_with(name))})" for name in found) or "none",
    ]
    return "| " + " | ".join(cells) + " |\n"


def frameworks(op: str) -> str:
    """Where an op's gradient is tested."""
    if op not in gradient_cases.differentiable():
        return ""
    names = {"torch": "torch", "jax": "JAX `jit`" if gradient_cases.compiles(op) else "JAX", "autograd": "autograd"}
    return ", ".join(names[framework] for framework in gradient_cases.FRAMEWORKS)


def listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def shown(default: object) -> str:
    return "[]" if default == () else f'"{default}"' if isinstance(default, str) else repr(default)


def yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def kernels_of(thing: Any, seen: set[Any]) -> set[str]:
    """The kernels that a function or class of weft asks for, itself or in what it refers to; other raw ops have their own."""
    home = getattr(thing, "__module__", "")
    if thing in seen or not home.startswith("weft.") or home.startswith(kernels.__name__):
        return set()
    seen.add(thing)
    kernels_here, others = read(thing)
    return set(kernels_here).union(*(kernels_of(other, seen) for other in others))


@cache
def read(thing: Any) -> tuple[list[str], list[Any]]:
    """The kernels that stand in the source of a function or class, and the functions and classes that do."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    return list(asked_for(tree)), list(referred_to(thing, tree))


def asked_for(tree: ast.AST) -> Iterator[str]:
    """Every `name` in `kernels.best("name", x)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "kernels.best" and node.args:
            names = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            yield from (name for name in names if modules_with(name))


def referred_to(thing: Any, tree: ast.AST) -> Iterator[Any]:
    """The functions and classes that stand in the source of `thing`."""
    known = vars(sys.modules[thing.__module__])
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Name):
            found = known.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = known.get(node.value.id)
            found = getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
        if isinstance(found, Op) and found.name not in raw_ops.__all__:
            found = found.function
        found = inspect.unwrap(found) if callable(found) else found
        if (inspect.isfunction(found) or inspect.isclass(found)) and found.__module__ != "weft._native":
            yield found


def modules_with(kernel: str) -> list[str]:
    """The kinds of kernels that have a kernel, whether or not the package they need is installed."""
    return [kind for kind, files in KERNELS.items() if any(kernel in names for names in files.values())]


def main() -> int:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if docs/ops.md is not what would be written")
    if not parser.parse_args().check:
        TARGET.write_text(table(), encoding="utf-8")
    elif not TARGET.exists() or TARGET.read_text(encoding="utf-8") != table():
        print("docs/ops.md is out of date: run tools/ops_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
