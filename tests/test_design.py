"""The rules of docs/design.md that can be seen from outside."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
from importlib.util import resolve_name
from pathlib import Path

import numpy as np
import pytest

import weft
from weft import raw_ops
from weft.core.arrays import Array
from weft.core.op import TABLE, Op, gradient

SOURCE = Path(weft.__file__).parent

#: What each room, or file at the top, may import beside itself.
ROOMS = {
    "errors": "",
    "core": "errors",
    "kernels": "errors core",
    "ragged": "errors core kernels",
    "batching": "errors core kernels ragged",
    "tensor_array": "errors core kernels ragged",
    "norm": "errors core kernels",
    "raw_ops": "ragged batching tensor_array norm",
    "aio": "errors core batching raw_ops",
    "torch": "norm",
    "__init__": "errors core kernels ragged batching tensor_array norm raw_ops serve",
    "serve": "errors core batching",
    "ray": "errors core ragged batching serve",
    "cli": "errors raw_ops serve __init__",
    "__main__": "cli kernels __init__",
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def place_of(name: str) -> str:
    """The room that a dotted name belongs to; what `weft` itself offers belongs to `__init__`."""
    second = f"{name}.__init__".split(".")[1]
    return second if second in ROOMS else "__init__"


def name_of(path: Path) -> str:
    return ".".join(["weft", *path.relative_to(SOURCE).with_suffix("").parts])


def imported(path: Path) -> set[str]:
    """Everything of weft that a file imports, at its head or inside a function, by its dotted name."""
    package = name_of(path).rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "weft" and not name.startswith("weft._native")}


def test_every_module_has_its_place():
    assert {name_of(path).split(".")[1] for path in modules()} == set(ROOMS)


def test_the_top_shows_the_architecture():
    entries = {path.name for path in SOURCE.iterdir() if path.suffix != ".so" and path.name != "__pycache__"}
    assert len(entries) <= 16, entries


@pytest.mark.parametrize("path", [path for path in modules() if "kernels" not in path.parts], ids=name_of)
def test_no_file_is_longer_than_500_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_go_one_way(path):
    own = name_of(path).split(".")[1]
    assert {place_of(name) for name in imported(path)} <= {own, *ROOMS[own].split()}


def test_imports_are_seen():
    seen = imported(SOURCE / "batching" / "ops.py")
    assert {"weft.core.op.op", "weft.batching.batch_arrays", "weft.batching.attributes.OpCall"} <= seen
    assert {*map(place_of, imported(SOURCE / "cli" / "demo.py"))} == {"__init__"}


LOADED = """
import sys, time
began = time.process_time()
import numpy
before, started = set(sys.modules), time.process_time()
import weft
print((time.process_time() - started) / (started - began))
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_importing_weft_loads_numpy_only():
    times = []  # as long as it takes to import NumPy
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=60)
        ratio, loaded = run.stdout.splitlines()
        foreign = {name for name in loaded.split() if "cython" not in name} - sys.stdlib_module_names
        assert foreign == {"weft"}
        times.append(float(ratio))
    assert min(times) < 3


def test_raw_ops_is_a_table_of_contents():
    for name in raw_ops.__all__:
        op = getattr(raw_ops, name)
        assert isinstance(op, Op)
        assert TABLE[name] is op


def test_a_gradient_that_asks_for_what_its_op_has_not_fails_where_it_is_defined():
    def double(x: Array) -> Array:
        return x + x

    def double_gradient(g, y):
        return {"x": g + g}

    with pytest.raises(TypeError, match=r"has the parameters \['y'\]"):
        gradient(Op("Double", double))(double_gradient)
    with pytest.raises(TypeError, match=r"has the parameters \['z'\]"):
        gradient(Op("Double", double), through=["z"])(lambda g, x: {"x": g})


def call(x, f, **attributes):
    given = {"num_batch_threads": 2, "max_batch_size": 1, "batch_timeout_micros": 0} | attributes
    (y,) = raw_ops.BatchFunction([np.array([float(x)])], [], f, Tout=["float64"], **given)
    return y.tolist()


def test_a_batch_is_run_by_one_of_its_callers():
    seen = []

    def f(x):
        seen.append((threading.current_thread(), threading.active_count()))
        return x

    with weft.scope():
        callers = [threading.Thread(target=call, args=(i, f), kwargs={"max_batch_size": 3, "batch_timeout_micros": 10_000_000})
                   for i in range(3)]  # fmt: skip
        before = threading.active_count()
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
    ((runner, alive),) = seen
    assert runner in callers
    assert alive <= before + len(callers)


LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "allocate_lock"}
NATIVE_LOCKS = (
    r"^\s*(?:std::\w*mutex|cdef PyThread_type_lock|pthread_\w+lock_t|pthread_mutex_t|pthread_cond_t) (\w+);?$"
)


def test_nothing_speaks_of_an_interface_that_was_never_released():
    root = Path(__file__).parent.parent
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if re.findall(r"^## (.*)$", text, re.MULTILINE) == ["[Unreleased]"]:  # then nothing can have changed
        assert re.findall(r"^### (.*)$", text, re.MULTILINE) == ["Added"]
    with pytest.raises(AttributeError, match="has no attribute 'backward_in_caller'"):
        weft.backward_in_caller  # noqa: B018


def makes_lock(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", None)) in LOCKS


def assigned_locks(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """The names of the variables and attributes that an assignment gives new locks; of several in a row, the last."""
    found = set()
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        is_tuple = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(target.elts, node.value.elts, strict=True) if is_tuple else [(target, node.value)]
        found |= {getattr(x, "attr", getattr(x, "id", "?")) for x, value in pairs if makes_lock(value)}
    attributes = {target.attr for target in getattr(node, "targets", []) if isinstance(target, ast.Attribute)}
    return found & attributes or found


def locks_of(path: Path) -> set[str]:
    """The names of the locks that a file makes; "?" for one that gets no name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(re.findall(NATIVE_LOCKS, text, re.MULTILINE))
    tree = ast.parse(text)
    made = [node for node in ast.walk(tree) if makes_lock(node)]
    assignments = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value]
    named = {node for each in assignments for node in ast.walk(each.value) if makes_lock(node)}
    imported = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in LOCKS
    }
    assert imported <= {None}, f"{path} imports a lock under another name"
    found = set().union(*(assigned_locks(each) for each in assignments))
    return found | ({"?"} if named < set(made) else set())


def test_every_lock_is_in_the_table():
    root = Path(__file__).parent.parent
    source = root / "src" / "weft"
    files = [path for path in source.rglob("*") if path.suffix in (".py", ".pyx", ".pxi", ".cpp", ".h")]
    found = {f"{path.relative_to(source).as_posix()}: {name}" for path in files for name in locks_of(path)}
    _, _, section = (root / "docs" / "design.md").read_text(encoding="utf-8").partition("\n## Locks\n")
    first_cells = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    rows = [name for cell in first_cells for name in re.findall(r"`(\S+: )(?:\w+\.)?(\w+)`", cell)]
    assert sorted(map("".join, rows)) == sorted(found)


def test_no_lock_is_held_while_f_runs():
    results = []

    def f(x):
        if x[0] == 1:
            other = threading.Thread(target=lambda: results.append(call(2, f)), daemon=True)
            other.start()
            other.join(30)
        return -x

    with weft.scope():
        assert call(1, f) == [-1.0]
    assert results == [[-2.0]]


def test_nothing_grows_with_calls():
    with weft.scope() as scope:
        counts = []
        for _ in range(3):
            for i in range(100):
                b = raw_ops.Batch([np.ones((1, 2))], 1, 1, 0, 0)
                raw_ops.Unbatch(b.batched_tensors[0], b.batch_index, b.id, 1_000_000)
                raw_ops.UnbatchGrad(b.batched_tensors[0], b.batch_index, np.ones((1, 2)), b.id)
                assert call(i, np.negative) == [-i]
            counts.append((scope.stored(), len(scope.resources)))
    assert counts == [(0, 4)] * 3
