"""The choice of kernels: the table lists what the files define, and the array decides."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.libraries import need

import weft
from weft import kernels
from weft.errors import FailedPreconditionError, InvalidArgumentError
from weft.kernels import choice, reference
from weft.kernels.choice import KERNELS, MODULES

FOLDER = Path(kernels.__file__).parent
NOT_KERNELS = {"accepts", "set_num_threads"}


def defined_in(file):
    tree = ast.parse((FOLDER / f"{file}.py").read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    native = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "_native"]
    names |= {alias.name for node in native for alias in node.names}
    return {name for name in names if not name.startswith("_")} - NOT_KERNELS


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind, files in KERNELS.items() for file in files])
def test_the_table_lists_what_a_file_defines(kind, file):
    assert set(KERNELS[kind][file]) == defined_in(file)


def test_the_reference_has_every_kernel():
    everything = {name for files in KERNELS.values() for names in files.values() for name in names}
    assert set(KERNELS["reference"]["reference"]) == everything
    assert list(KERNELS) == list(MODULES)


def test_the_array_decides():
    assert kernels.which("concat_rows", np.ones(2)) == "host"
    assert kernels.which("repeat_rows", np.ones(2)) == "reference"
    assert kernels.which("row_sum", np.ones(2, bool)) == "reference"


def test_the_first_slow_call_says_why(monkeypatch, caplog):
    monkeypatch.setattr(choice, "is_installed", lambda kind: kind != "native")
    monkeypatch.setattr(choice, "_CHOSEN", {})
    choice._tell_once.cache_clear()
    for _ in range(2):
        assert kernels.which("repeat_rows", np.ones(2)) == kernels.which("row_sum", np.ones(2)) == "reference"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "weft._native is not installed (there was no C++ compiler" in caplog.text


@pytest.fixture
def without_native(monkeypatch):
    """No kernel in C++ is found, as in an install of pure Python."""
    installed = choice.is_installed
    monkeypatch.setattr(choice, "is_installed", lambda kind: kind != "native" and installed(kind))
    monkeypatch.setattr(choice, "_CHOSEN", {})


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad", "jit of vmap", "jit of grad", "checkpoint"])
@pytest.mark.parametrize("name", ["batch_norm", "row_sum"])
def test_a_traced_array_is_not_asked_for_its_device(without_native, transform, name):
    need("jax")
    import jax

    splits = np.array([0, 2, 2, 5])
    calls = {
        "batch_norm": lambda x: weft.batch_norm(x, training=True).y,
        "row_sum": lambda x: weft.RaggedTensor(x, [splits]).sum(),
    }

    def loss(x):
        return (calls[name](x) ** 2).sum()

    x = jax.numpy.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), "float32")
    each = [loss(one) for one in x]
    transformed = {
        "jit": lambda: [jax.jit(loss)(one) for one in x],
        "vmap": lambda: jax.vmap(loss)(x),
        "grad": lambda: [jax.value_and_grad(loss)(one)[0] for one in x],
        "jit of vmap": lambda: jax.jit(jax.vmap(loss))(x),
        "jit of grad": lambda: [jax.jit(jax.value_and_grad(loss))(one)[0] for one in x],
        "checkpoint": lambda: [jax.value_and_grad(jax.checkpoint(loss))(one)[0] for one in x],
    }
    np.testing.assert_allclose(transformed[transform](), each, rtol=1e-4)


def test_a_traced_array_has_reference_kernels(without_native):
    need("jax")
    import jax

    kinds = []
    jax.make_jaxpr(lambda x: kinds.append(kernels.which("batch_norm", x)))(jax.numpy.ones(2))
    assert kinds == ["reference"]


AWKWARD = np.array([[np.inf, 1e38], [-np.inf, 1e38], [np.nan, -1e38], [1e-45, 3e38], [0, -3e38]], np.float32)


@pytest.mark.parametrize("name", sorted(name for name in KERNELS["reference"]["reference"] if "row" in name))
def test_the_reference_warns_of_no_number_in_rows(name):
    """As the kernels in C++, which compute what comes of infinities without a word."""
    splits, starts, lengths = np.array([0, 2, 2, 5]), np.array([0, 1, 2]), np.array([2, 2, 3])
    calls = {
        "concat_rows": ([AWKWARD, AWKWARD], 12), "cut_rows": (AWKWARD, [(0, 2)]), "split_rows": (AWKWARD, splits),
        "join_rows": ([AWKWARD],), "unstack_rows": (AWKWARD,), "stack_rows": ([AWKWARD],),
        "longest_row": (splits,), "row_bounds": (splits, np.array([1, 2])), "take_rows": (AWKWARD, starts, splits),
        "pad_rows": (AWKWARD, np.float32(0), splits, 3, 3), "row_sum": (AWKWARD, splits), "row_max": (AWKWARD, splits),
        "place_rows": (AWKWARD, np.float32(0), starts, lengths, np.array([0, 2, 4]), 8),
        "add_rows": (AWKWARD, starts, lengths, np.array([0, 0, 0]), 5), "row_softmax": (AWKWARD, splits),
        "repeat_rows": (AWKWARD[:3], splits),
        "range_rows": (AWKWARD[:3, 1], np.float32([3e38, 1e38, 1]), splits),
    }  # fmt: skip
    with np.errstate(all="raise"):
        getattr(reference, name)(*calls[name])


@pytest.mark.parametrize("name", sorted(name for name in KERNELS["reference"]["reference"] if "norm" in name))
def test_the_reference_warns_of_no_number_in_batch_norm(name):
    vector = np.array([np.inf, -3e38], np.float32)
    role = {"x": AWKWARD, "g": AWKWARD, "u": AWKWARD, "epsilon": 1e-3, "axis": 1, "mask": None, "old": None}
    kernel = getattr(reference, name)
    given = [role.get(parameter, vector) for parameter in inspect.signature(kernel).parameters]
    if name == "batch_norm_running":
        given[-1] = (0.9, 0.1, 0.1)
    with np.errstate(all="raise"):
        kernel(*given)


def test_a_kernel_that_a_kind_has_not_is_refused():
    with kernels.use("host"), pytest.raises(FailedPreconditionError, match="'host' have no row_sum"):
        kernels.best("row_sum", np.ones(2))
    with pytest.raises(InvalidArgumentError, match="there is no kernel 'nothing'"):
        weft.kernels.best("nothing", np.ones(2))
    with (
        pytest.raises(InvalidArgumentError, match="one of cuda, host, native, reference, got 'gpu'"),
        kernels.use("gpu"),
    ):
        pass


def test_a_tensor_without_values_decides_nothing_for_others(monkeypatch):
    need("torch")
    need("weft._native")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(choice, "_CHOSEN", {})
    with FakeTensorMode():
        assert kernels.which("row_sum", torch.ones(2)) == "reference"
    assert kernels.which("row_sum", torch.ones(2)) == "native"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_the_reference_takes_unsigned_tensors(dtype):
    """torch itself can neither index nor reduce most of them."""
    need("torch")
    import torch

    info, splits = np.iinfo(dtype), np.array([0, 2, 2, 5])
    x = np.random.default_rng(0).integers(0, info.max, (5, 2), dtype, endpoint=True)
    calls = {
        "row_sum": (splits,),
        "row_max": (splits,),
        "repeat_rows": (np.array([0, 1, 1, 3, 4, 6]),),
        "add_rows": (splits[:-1], np.diff(splits), np.array([0, 1, 1]), 5),
    }
    for name, arguments in calls.items():
        kernel = getattr(reference, name)
        got, wanted = kernel(torch.from_numpy(x), *arguments), kernel(x, *arguments)
        assert got.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(got.numpy(), wanted)


STALE = """
import importlib.machinery as machinery
class Loader(machinery.SourceFileLoader):
    def get_code(self, name):
        return compile(self.get_data(self.path).replace(b"NATIVE_VERSION = ", b"NATIVE_VERSION = -"), self.path, "exec")
plain = machinery.PathFinder.find_spec
def find_spec(name, *rest):
    spec = plain(name, *rest)
    if name == "weft.kernels":
        spec.loader = Loader(name, spec.origin)
    return spec
machinery.PathFinder.find_spec = find_spec
import weft
"""


def test_an_extension_of_other_sources_is_refused():
    need("weft._native")
    done = subprocess.run([sys.executable, "-c", STALE], capture_output=True, text=True, timeout=60)
    assert "ImportError: weft._native was built from older or newer sources" in done.stderr


def test_the_version_of_the_extension():
    """If this fails, raise NATIVE_VERSION in kernels/__init__.py and kernels/native/module.pyx, and change the numbers here."""
    need("weft._native")
    from weft import _native

    functions = [f for _, f in inspect.getmembers(_native, inspect.isroutine) if f.__module__ == "weft._native"]
    found = "\n".join(f"{f.__name__}{inspect.signature(f)}" for f in functions)
    assert (kernels.NATIVE_VERSION, zlib.crc32(found.encode())) == (5, 3230136839), found


def test_only_arrays_have_kernels():
    for x in (None, "x", [1.0]):
        with pytest.raises(InvalidArgumentError, match="takes an array"):
            kernels.which("batch_norm", x)
    with pytest.raises(InvalidArgumentError, match="must be one of"), kernels.use(["native"]):
        pass
