"""Whatever a caller, a hook or another thread does with an array, weft neither crashes nor reads past an end.

The attacks run in a process of their own, so that a crash is a failed test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.attacks import RESIZED
from support.libraries import back, for_each, need, to

import weft
from weft import RaggedTensor, VariantArray, raw_ops
from weft.core import memory

ATTACKS = Path(__file__).parents[1] / "support" / "attacks.py"
FOLDER = Path(weft.__file__).parent


def run(*arguments, **settings):
    """The result of a Python program that is given these arguments."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), **settings}
    command = [sys.executable, "-X", "faulthandler", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)


CHANGES = ["caller_changes_splits", "caller_changes_what_it_got", "caller_resizes_values"]
RACES = [
    "other_thread_flips_splits", "other_thread_flips_indices", "other_thread_flips_batch_index", "other_thread_resizes_values",
    "other_thread_resizes_what_batch_norm_reads", "other_thread_resizes_what_a_tensor_array_reads",
]  # fmt: skip
ON_TENSORS = [
    "caller_resizes_splits", "hooks_change_running_statistics", "hooks_change_parameters", "hooks_change_saved_tensors",
]  # fmt: skip


def attack(library, seconds, *names):
    """Run attacks, whose races take so many seconds each."""
    ended = run(str(ATTACKS), library, str(seconds), *names)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.split() == list(names)


@for_each("seconds", [0.1, 0.7], slow=[0.7])
def test_attacks(seconds):
    attack("numpy", seconds, *CHANGES, *RACES)


def test_attacks_on_tensors():
    need("torch")
    # On tensors the reference kernels are torch's own arithmetic, which nothing holds memory for: docs/differences.md.
    need("weft._native")
    attack("torch", 0, *CHANGES, *ON_TENSORS)


@pytest.mark.slow
def test_races_for_tensors():
    need("torch")
    need("weft._native")  # as above
    attack("torch", 0.7, *RACES)


# ---- what the protection is made of


def test_held_memory_is_not_resized():
    x = np.ones(10)
    held = memory.hold(x[2:4])
    for resize in RESIZED["numpy"]:
        with pytest.raises(ValueError, match="cannot resize"):
            resize(x)
    del held
    RESIZED["numpy"][0](x)
    assert x.shape == (1,)


@for_each("x", [np.arange(6), np.arange(6)[::2], np.arange(6).reshape(2, 3).T, np.array(3), np.zeros((0, 3)), [1, 2]])
def test_own_memory_cannot_be_written_to(x):
    x = np.asarray(x)
    own = memory.own(x)
    assert own.tolist() == x.tolist()
    assert own.dtype == x.dtype
    assert not np.shares_memory(own, x)
    with pytest.raises(ValueError, match="WRITEABLE"):
        own.flags.writeable = True


def test_own_memory_is_copied_once():
    first = memory.own(np.arange(5))
    second = memory.own(first)
    assert second is not first
    assert np.shares_memory(first, second)
    assert not np.shares_memory(memory.own(first[1:]), first)
    assert memory.own(first.view("i4")).dtype == np.int32


@for_each(
    "name", ["pad_rows", "take_rows", "place_rows", "add_rows", "row_sum", "row_max", "row_softmax", "row_bounds"]
)
@for_each("width", [1, 3, 8, 20])
@for_each("wrong", [-1, 7, 2**62, -(2**62)])
def test_kernels_refuse_rows_outside_the_values(name, width, wrong):
    need("weft._native")
    from weft.kernels import native

    kernel = getattr(native, name)
    x = np.ones((6, width))
    for place in range(4):
        splits, rows = np.array([0, 2, 4, 6]), np.array([0, 2, 4])
        splits[place] = wrong
        rows[min(place, 2)] = wrong
        two, good = np.full(3, 2), np.array([0, 2, 4])
        calls = {
            "pad_rows": [(x, 0, splits, 3, 2)],
            "take_rows": [
                (x, rows, np.array([0, 2, 4, 6])),
                (x, good, splits if wrong < 10 else np.array([0, -1, 1, 3])),
            ],
            "place_rows": [(x, 0, rows, two, good, 6), (x, 0, good, two, rows, 6), (x, 0, good, rows - 1, good, 6)],
            "add_rows": [(x, rows, two, good, 6), (x, good, two, rows, 6), (x, good, rows - 1, good, 6)],
            "row_bounds": [(np.array([0, 2, 4, 6]), rows)],
        }.get(name, [(x, splits)])
        for arguments in calls:
            with pytest.raises(weft.errors.InvalidArgumentError, match="rows must begin and end within the values"):
                kernel(*arguments)


def test_splits_that_count_more_rows_than_fit_in_memory_are_refused():
    levels = [np.array([0, 1, 10**13]), np.array([0, 2, 5])]
    with pytest.raises(weft.errors.ResourceExhaustedError, match="does not fit in memory"):
        raw_ops.RaggedTensorToTensor([-1, 2, 2], np.ones(5), 0.0, levels, ["ROW_SPLITS", "ROW_SPLITS"])


def test_a_copied_ragged_tensor_is_checked_anew():
    rt = RaggedTensor.from_row_splits(np.ones(5), [0, 2, 2, 5])
    make, arguments, _ = rt.__reduce__()
    assert make(*arguments).to_list() == rt.to_list()
    with pytest.raises(weft.errors.InvalidArgumentError, match="must end with"):
        make(*arguments[:2], [np.array([0, 2, 99])])
    variant = rt.to_variant().reshape((3, 1))
    make, arguments = variant.__reduce__()
    assert make(*arguments) == variant
    with pytest.raises(weft.errors.InvalidArgumentError, match="must end with"):
        make((2,), (np.array([0, 2, 99]),), np.ones(5))
    listed = VariantArray([np.ones(2), None, ([[0, 1]], np.ones(1))])
    make, arguments = listed.__reduce__()
    assert make(*arguments) == listed


def test_a_variant_array_keeps_its_values_where_they_are():
    values = np.ones(5)
    variant = raw_ops.RaggedTensorToVariant([np.array([0, 2, 2, 5])], values, True)
    part = variant[1:]
    del variant
    with pytest.raises(ValueError, match="cannot resize"):
        values.resize((1,), refcheck=False)
    del part
    values.resize((1,), refcheck=False)


# ---- numbers that their dtype cannot hold

INTEGERS = ["uint8", "uint16", "uint32", "int8", "int16", "int32"]


@for_each("dtype", INTEGERS)
def test_softmax_and_mean_of_integers(library, dtype):
    limit = int(np.iinfo(dtype).max) if "8" in dtype else 300
    numbers = np.array([limit, limit - 1, 0, 1, 0])
    rt = RaggedTensor.from_row_splits(to(library, numbers.astype(dtype)), [0, 3, 3, 5])
    exact = RaggedTensor.from_row_splits(numbers.astype(float), [0, 3, 3, 5])
    np.testing.assert_allclose(back(rt.softmax().flat_values), exact.softmax().flat_values, rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(back(rt.mean()), exact.mean(), rtol=1e-6)
    assert "float" in str(rt.mean().dtype)


def test_a_mean_counts_rows_longer_than_the_dtype_can_count(library):
    for dtype in ("uint8", "int8", "float16"):
        rt = RaggedTensor.from_row_splits(to(library, np.full(70_000, 2).astype(dtype)), [0, 70_000])
        assert back(rt.mean()).tolist() == [2.0]


def test_half_precision_is_summed_in_single(library):
    rt = RaggedTensor.from_row_splits(to(library, np.ones(5000, np.float16)), [0, 5000])
    assert back(rt.sum()).tolist() == [5000.0]
    assert str(rt.sum().dtype).removeprefix("torch.") == "float16"
    assert str(rt.softmax().dtype).removeprefix("torch.") == "float16"
