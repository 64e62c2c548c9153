"""The object of each array library."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from support.callers import PATIENCE, start
from support.libraries import LIBRARIES, back, need, to

from weft.core import small
from weft.core.arrays import get_library, get_library_of, library_of
from weft.core.libraries.base import lazy
from weft.errors import InvalidArgumentError


@pytest.fixture(params=LIBRARIES)
def library(request):
    need(request.param)
    return get_library(request.param)


def test_an_array_has_its_library(library):
    x = to(library.name, np.ones(3, np.float32))
    assert get_library_of(x) is library
    assert library_of(x) == library.name
    assert library.is_concrete(x)
    assert library.is_on_host(x)
    hash(library.device(x))


def test_other_values_are_numpys():
    assert get_library_of([1, 2]).name == get_library_of(None).name == "numpy"
    assert get_library("numpy").host([1, 2]).tolist() == [1, 2]
    with pytest.raises(InvalidArgumentError, match="readable as an array"):
        get_library("numpy").host([[1], [1, 2]])


def test_arrays_are_read_and_made(library):
    x = to(library.name, np.arange(3, dtype=np.float32))
    assert library.asarray(x) is x
    assert library_of(library.asarray([1.0, 2.0])) == library.name
    assert library.host(x).tolist() == [0, 1, 2]
    assert library.host(library.asarray(x, library.dtype("float16"))).dtype == np.float16
    assert back(library.cast(x, library.dtype("int32"))).dtype == np.int32


def test_a_copy_has_its_own_memory(library):
    x = to(library.name, np.zeros(3, np.float32))
    copy = library.copy(x)
    assert library_of(copy) == library.name
    if library.name != "jax":
        x[0] = 1
        assert back(copy).tolist() == [0, 0, 0]
        assert library.is_view(x[1:])
        assert not library.is_view(copy)


def test_indices_stay_64_bit_integers(library):
    assert back(library.index(np.array([2**40]))).tolist() == [2**40]


def test_bfloat16(library):
    need("ml_dtypes")
    import ml_dtypes

    x = library.asarray([1.5, 2.5], library.dtype("bfloat16"))
    assert library.host(x).dtype == ml_dtypes.bfloat16


def test_a_torch_graph_is_cut():
    need("torch")
    import torch

    library, x = get_library("torch"), torch.ones(2)
    y = x.clone().requires_grad_()
    assert (library.has_graph(x), library.has_graph(y), library.has_graph(library.detach(y))) == (False, True, False)
    assert library.detach(x) is x
    assert library.copy(y).requires_grad
    assert not library.is_concrete(torch.ones(2, device="meta"))


def test_an_autograd_box_is_read():
    need("autograd")
    import autograd

    seen = []

    def function(x):
        library = get_library_of(x)
        seen.append((library.name, library.host(x).tolist(), library.detach(x).tolist(), library.asarray(x) is x))
        return x.sum()

    autograd.grad(function)(np.ones(2))
    assert seen == [("autograd", [1.0, 1.0], [1.0, 1.0], True)]


def test_a_half_imported_library_has_no_arrays():
    code = (
        "import sys, types\n"
        "from weft.core.arrays import library_of\n"
        "for name in ('torch', 'jax', 'autograd'): sys.modules[name] = types.ModuleType(name)\n"
        "print(library_of(object()), library_of([1]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "None None\n"


def test_the_compiled_functions_are_used_if_there_are_any():
    try:
        from weft import _native
    except ImportError:
        pytest.skip("weft is not compiled")
    names = ["are_plain", "cut", "index", "no_index", "no_rows", "pieces", "rows_alike", "scalar", "stack"]
    assert [getattr(small, name) for name in names] == [getattr(_native, name) for name in names]


def test_a_lazy_attribute_has_no_lock():
    """A child that is forked while another thread computes one would wait for a lock for ever."""
    is_inside, may_end = threading.Event(), threading.Event()

    class Slow:
        @lazy
        def value(self):
            if not is_inside.is_set():
                is_inside.set()
                may_end.wait(PATIENCE)
            return [7]

    slow = Slow()
    first = start(lambda: slow.value)
    assert is_inside.wait(PATIENCE)
    assert start(lambda: slow.value).answer(10) == [7]
    may_end.set()
    assert first.answer() == [7]
    assert slow.value is slow.value
