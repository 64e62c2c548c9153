"""What importing weft loads; test_design.py holds the order of its modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent

#: Libraries that are imported with a module of ours, and the modules that may do so.
OPTIONAL = {
    "triton": {
        "weft.kernels.cuda_call",
        "weft.kernels.cuda_kernels",
        "weft.kernels.cuda_launch",
        "weft.kernels.cuda_ragged_kernels",
    },
    "torch": {
        "weft.kernels.cuda",
        "weft.kernels.cuda_call",
        "weft.kernels.cuda_ragged",
        "weft.core.adapters.torch",
        "weft.core.libraries.torch",
        "weft.core.torch_internals",
        "weft.batching.torch_modes",
        "weft.core.torch_split",
        "weft.batching.devices",
        "weft.batching.torch",
        "weft.norm.torch_function",
        "weft.norm.torch",
        "weft.ray.torch",
        "weft.ray.weights",
    },
    "jax": {
        "weft.core.adapters.jax",
        "weft.core.libraries.jax",
        "weft.core.jax_internals",
        "weft.tensor_array.jax",
        "weft.batching.jax",
    },
    "autograd": {"weft.core.adapters.autograd", "weft.core.libraries.autograd"},
    "asyncio": {"weft.batching.async_function", "weft.batching.tasks", "weft.batching.replay"},
}


def name_of(path: Path) -> str:
    parts = ["weft", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(module: str, top_level_only: bool = False) -> set[str]:
    """The full names of the modules that a module of ours imports."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    is_package = MODULES[module].name == "__init__.py"
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: -(node.level - is_package) or None]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names} & MODULES.keys()
            found.update(inner if len(inner) == len(node.names) else {base, *inner})
    return found


def test_the_reader_of_imports_sees_them():
    assert imports_of("weft.batching.ops") >= {
        "weft.core.check",
        "weft.core.scope",
        "weft.core.op",
        "weft.batching.ids",
        "numpy",
    }
    assert imports_of("weft.kernels.choice") >= {"weft.core.arrays", "weft.errors"}
    assert "weft" not in imports_of("weft.batching.ops")


def test_no_module_imports_itself_in_a_circle():
    graph = {module: imports_of(module, top_level_only=True) & MODULES.keys() for module in MODULES}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle: {' -> '.join([*above, module])}"
        if module not in done:
            for other in graph[module] - {module}:
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_optional_libraries_are_imported_in_one_file_each(module):
    for imported in imports_of(module, top_level_only=True):
        library = imported.split(".")[0]
        if library in OPTIONAL and not (library == "asyncio" and module.startswith(("weft.serve.", "weft.ray."))):
            assert module in OPTIONAL[library], f"{module} imports {library}"


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_importing_weft_loads_numpy_and_nothing_else():
    loaded = python("import weft, sys; print(*{name.partition('.')[0] for name in sys.modules})").split()
    ours = {"numpy", "weft", "cython_runtime"}
    # What an installation hooks into every Python start is not weft's doing.
    before = python("import sys; print(*{name.partition('.')[0] for name in sys.modules})").split()
    foreign = {name for name in loaded if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert foreign - set(before) <= ours
    assert "asyncio" not in loaded


def test_the_public_names_are_there():
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    with pytest.raises(AttributeError):
        weft.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("library", ["torch", "jax", "autograd"])
def test_other_libraries_may_come_later(library):
    """weft imported first, then the library: its arrays are known all the same."""
    pytest.importorskip(library)
    make = {
        "torch": "import torch; x = torch.ones(1, 2)",
        "jax": "import jax.numpy as jnp; x = jnp.ones((1, 2))",
        "autograd": "import autograd.numpy as np; x = np.ones((1, 2))",
    }[library]
    out = python(f"import weft; {make}; print(type(weft.raw_ops.Batch([x], 1, 1, 0, 0).batched_tensors[0]) is type(x))")
    assert out.strip() == "True"


def test_a_backward_of_a_batch_imports_no_compiler():
    """torch imports its symbolic shapes in the first `torch.autograd.backward` with given gradients, which takes 0.2 s."""
    pytest.importorskip("torch")
    pytest.importorskip("optree")
    code = """
import sys, torch, weft
y = weft.batched(lambda x: x * 2, max_batch_size=8)(torch.ones(5, requires_grad=True))
before = set(sys.modules)
y.sum().backward()
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"weft", "torch"}))
"""
    assert python(code).strip() == "[]"


def test_no_name_hides_a_room():
    """`import weft.room.module as x` follows the attributes of `weft`, where a function may not stand in a room's place."""
    rooms = [path for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    modules = [
        f"weft.{room.name}.{path.stem}" for room in rooms for path in room.glob("*.py") if path.stem != "__init__"
    ]
    for name in modules:
        with suppress(ModuleNotFoundError):  # of an optional library; a hidden room is another ImportError
            exec(f"import {name} as x", {})
