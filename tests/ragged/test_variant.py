"""The variant array: its shape, its elements, and that rows in one buffer cost nothing until somebody asks for one."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from support.libraries import back, need, to

from weft import VariantArray, raw_ops
from weft.errors import InvalidArgumentError, NotFoundError
from weft.ragged.parts import RaggedValue

SPLITS = np.array([0, 2, 3, 3, 6])
VALUES = np.arange(12.0).reshape(6, 2)


def rows(splits=SPLITS, values=VALUES):
    return raw_ops.RaggedTensorToVariant([splits], values, True)


def lengths(v):
    return [None if e is None else e.values.shape[0] for e in v.elements()]


def test_what_it_is():
    v = rows()
    assert (v.shape, v.ndim, v.size, len(v), v.dtype.name, v.library) == ((4,), 1, 4, 4, "variant", "numpy")
    assert repr(v) == "VariantArray(shape=(4,), [float64[2, 2], float64[1, 2], float64[0, 2], float64[3, 2]])"
    assert repr(VariantArray([None] * 9)).endswith("filler, ...])")
    assert repr(VariantArray([([[0, 1, 1], [0, 1]], np.ones(1))])).endswith("[float64[1] in 2 rows, 2 deep])")
    with pytest.raises(TypeError):
        len(v[0])
    with pytest.raises(TypeError):
        iter(v[0])
    with pytest.raises(TypeError):
        hash(v)


def test_encoding_copies_nothing(library):
    need(library)
    values = to(library, VALUES.astype(np.float32))
    v = raw_ops.RaggedTensorToVariant([SPLITS], values, True)
    decoded = raw_ops.RaggedTensorFromVariant(v, 0, 1, "float32")
    gradient = raw_ops.RaggedTensorToVariantGradient(v, SPLITS, (6, 2), "float32")
    for out in (v.columns.values, decoded.output_dense_values, gradient):
        assert np.shares_memory(back(out), back(values))


def test_memory_of_encoding_does_not_grow_with_values():
    splits = np.arange(100_001) * 8
    values = np.zeros(800_000, np.float32)
    tracemalloc.start()
    v = rows(splits, values)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert v.shape == (100_000,)
    assert held < splits.nbytes + 2_000  # its own splits
    assert peak < splits.nbytes + 2 * len(splits)  # the check of the splits: a byte a row


def test_what_is_shared_cannot_be_written_through():
    v = rows()
    decoded = raw_ops.RaggedTensorFromVariant(v, 0, 1, "float64")
    for out in (decoded.output_dense_values, decoded.output_nested_splits[0], v[0].item().values):
        with pytest.raises(ValueError, match="read-only"):
            out[...] = 0
    assert VALUES.flags.writeable
    assert SPLITS.flags.writeable


def test_indexing():
    v = rows()
    assert lengths(v[1:]) == [1, 0, 3]
    assert lengths(v[::-2]) == [3, 1]
    assert lengths(v[-1]) == [3]
    assert lengths(v[np.array([True, False, True, False])]) == [2, 0]
    assert lengths(v[[3, 3, 0]]) == [3, 3, 2]
    assert v[None].shape == (1, 4)
    assert v[..., None].shape == (4, 1)
    m = v.reshape((2, 2))
    assert m[1].shape == (2,)
    assert lengths(m[:, 0]) == [2, 0]
    assert lengths(m[1:]) == [0, 3]
    assert lengths(m[0, 1]) == [1]
    for bad in (4, -5, "x", (0, 0)):
        with pytest.raises(InvalidArgumentError):
            v[bad]


def test_slices_of_columns_stay_columns():
    assert rows()[1:3].columns.splits[0].tolist() == [0, 1, 1]
    v = raw_ops.RaggedTensorToVariant([np.array([0, 1, 3]), np.array([0, 2, 2, 5])], np.arange(5), True)
    cut = v[1:]
    assert [s.tolist() for s in cut.columns.splits] == [[0, 2], [0, 0, 3]]
    assert cut.columns.values.tolist() == [2, 3, 4]
    assert cut == VariantArray([([np.array([0, 0, 3])], np.array([2, 3, 4]))])


def test_iteration_stack_unstack_gather_reshape():
    v = rows()
    assert [lengths(e) for e in v] == [[2], [1], [0], [3]]
    assert VariantArray.stack(list(v)) == v
    assert VariantArray.stack([v, v], axis=1).shape == (4, 2)
    assert lengths(VariantArray.stack([v, v[::-1]], axis=1)) == [2, 3, 1, 0, 0, 1, 3, 2]
    assert VariantArray.stack(v.reshape((2, 2)).unstack(axis=1), axis=1) == v.reshape((2, 2))
    assert lengths(v.gather([[3, 0]])) == [3, 2]
    assert v.gather([1, 0], axis=0).shape == (2,)
    assert lengths(v.reshape((2, 2)).gather([1], axis=1)) == [1, 3]
    assert v.reshape((-1, 2)).shape == (2, 2)
    for bad in (
        lambda: v.reshape((3,)),
        lambda: v.gather([4]),
        lambda: v.gather([-1]),
        lambda: v.gather([0.5]),
        lambda: v.gather([0], axis=1),
    ):
        with pytest.raises(InvalidArgumentError):
            bad()
    for bad in (lambda: VariantArray.stack([]), lambda: VariantArray.stack([v, v[:1]]), lambda: v.unstack(3)):
        with pytest.raises(InvalidArgumentError):
            bad()


def test_concat_of_columns_stays_columns():
    v = VariantArray.concat([rows(), rows()[1:3]])
    assert v.columns.splits[0].tolist() == [0, 2, 3, 3, 6, 7, 7]
    assert v.columns.values.shape == (7, 2)
    mixed = VariantArray.concat([v, VariantArray([None, ([[0, 1]], np.ones(1))])])
    assert mixed.columns is None
    assert lengths(mixed) == [2, 1, 0, 3, 1, 0, None, 1]
    zero = raw_ops.RaggedTensorToVariant([], VALUES, True)
    assert VariantArray.concat([zero, zero[2:]]).columns.values.shape == (10, 2)
    assert VariantArray.concat([rows().reshape((2, 2)), rows().reshape((2, 2))]).shape == (4, 2)
    for bad in ([], [rows(), rows().reshape((2, 2))], [rows()[0]]):
        with pytest.raises(InvalidArgumentError):
            VariantArray.concat(bad)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_cut_pieces_own_their_memory(library, shape):
    need(library)
    values = to(library, VALUES.astype(np.float32))
    v = raw_ops.RaggedTensorToVariant([SPLITS], values, True).reshape(shape)
    half = shape[0] // 2
    for bounds in ([(0, half), (half, 2 * half)], [(0, half), (0, 2 * half)], [(half, half)]):
        for source in (v, VariantArray(v.elements(), shape)):
            pieces = source.cut(bounds)
            assert [p.shape for p in pieces] == [(b - a, *shape[1:]) for a, b in bounds]
            for piece, (a, b) in zip(pieces, bounds, strict=True):
                assert piece == v[a:b]
                held = [e.values for e in piece.elements()]
                assert not any(np.shares_memory(back(h), back(values)) for h in held)


def test_cut_is_one_node():
    need("torch")
    import torch

    x = torch.arange(6.0, requires_grad=True)
    pieces = raw_ops.RaggedTensorToVariant([SPLITS], x, True).cut([(0, 1), (1, 4)])
    (pieces[0].columns.values.sum() + 2 * pieces[1].columns.values.sum()).backward()
    assert x.grad.tolist() == [1, 1, 2, 2, 2, 2]
    behind = [p.columns.values.grad_fn.next_functions[0][0] for p in pieces]
    assert behind[0] is behind[1]


def test_select():
    v, other = rows(), VariantArray([None] * 4)
    assert lengths(VariantArray.select([True, False, True, False], v, other)) == [2, None, 0, None]
    assert VariantArray.select(True, v[:1], v) == v[[0, 0, 0, 0]]
    with pytest.raises(InvalidArgumentError):
        VariantArray.select([True, False], v, v)


def test_constructor():
    v = VariantArray([np.ones(2), None, ([np.array([0, 1])], [3.0]), rows()[0]], (2, 2))
    assert lengths(v) == [2, None, 1, 2]
    assert VariantArray([1.5]).item() == RaggedValue((), np.asarray(1.5))
    assert VariantArray(["a"]).item().values.dtype == object
    assert VariantArray([], (0, 3)).shape == (0, 3)
    for bad in (([np.ones(2)], (3,)), ([([[0]],)], None), ([[[1], [1, 2]]], None)):
        with pytest.raises(InvalidArgumentError):
            VariantArray(*bad)
    with pytest.raises(NotFoundError):
        VariantArray([np.zeros(1, "datetime64[s]")])
    with pytest.raises(InvalidArgumentError):
        v.item()


def test_equality():
    assert rows() == rows()
    assert rows() != rows()[1:]
    assert rows() != rows(values=VALUES + 1)
    assert rows() != rows(values=VALUES.astype(np.float32))
    assert VariantArray([None]) == VariantArray([None])
    assert VariantArray([None]) != VariantArray([np.ones(1)])
    assert VariantArray([([[0, 1]], np.ones(1))]) != VariantArray([np.ones(1)])
    assert rows() != 3


def test_sums():
    v = rows()
    assert (v + v).columns.values.tolist() == (VALUES * 2).tolist()
    assert v + VariantArray([None] * 4) == v
    assert VariantArray([None]) + VariantArray([None]) == VariantArray([None])
    with pytest.raises(InvalidArgumentError):
        v + v[1:]
    with pytest.raises(InvalidArgumentError):
        v + v[::-1]
    with pytest.raises(TypeError):
        v + 1
    with pytest.raises(InvalidArgumentError):
        VariantArray.add_n([])


@pytest.mark.parametrize("count", range(1, 9))
def test_add_n_adds_in_tensorflows_order(count):
    terms = [np.float32(10.0**i) * np.float32(1.1) for i in range(count)]
    tree = list(terms)
    stride = 1
    while stride < len(tree):
        left = range(0, len(tree), stride)
        for i in range(stride, len(tree), 2 * stride):
            tree[i - stride] = tree[i - stride] + tree[i]
        if len(left) % 2 and len(left) > 1:
            tree[0] = tree[0] + tree[left[-1]]
            tree = tree[: left[-1]]
        stride *= 2
    added = VariantArray.add_n([VariantArray([np.asarray(t)], ()) for t in terms])
    assert added.item().values == tree[0]


def test_zeros():
    v = VariantArray([np.ones(2), None, ([[0, 1]], np.ones(1, bool))]).zeros_like()
    assert [None if e is None else e.values.tolist() for e in v.elements()] == [[0, 0], None, [False]]
    assert rows().zeros_like().columns.values.sum() == 0
    with pytest.raises(InvalidArgumentError):
        VariantArray([np.array(["a"], object)]).zeros_like()


BYTES = {
    "columns": rows(),
    "nested": raw_ops.RaggedTensorToVariant([np.array([0, 1, 3]), np.array([0, 2, 2, 5])], np.arange(5), True),
    "rank 0": raw_ops.RaggedTensorToVariant([], VALUES, True),
    "scalar": raw_ops.RaggedTensorToVariant([SPLITS], VALUES, False),
    "mixed": VariantArray(
        [None, np.ones(2, np.complex64), ([[0, 1]], np.zeros(1, bool)), np.array(2, np.uint8)], (2, 2)
    ),
    "text": VariantArray([np.array(["a", "", "ü"], object), np.array([b"\xff", "x"], object)]),
    "empty": rows()[:0],
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_and_back(name):
    v = BYTES[name]
    read = VariantArray.from_bytes(v.to_bytes())
    assert read == v
    assert (read.columns is None) == (v.columns is None)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_bytes_of_other_libraries(library):
    need(library)
    values = to(library, VALUES.astype(np.float32))
    read = VariantArray.from_bytes(raw_ops.RaggedTensorToVariant([SPLITS], values, True).to_bytes())
    assert read == rows(values=VALUES.astype(np.float32))


def test_bytes_of_bfloat16():
    need("torch")
    import torch

    v = VariantArray([torch.ones(2, dtype=torch.bfloat16)])
    read = VariantArray.from_bytes(v.to_bytes()).item().values
    assert read.dtype.name == "bfloat16"
    assert read.astype(float).tolist() == [1, 1]


@pytest.mark.parametrize("name", BYTES)
def test_broken_bytes_are_refused(name):
    data = BYTES[name].to_bytes()
    rng = random.Random(0)
    for _ in range(400):
        broken = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            read = VariantArray.from_bytes(bytes(broken))
        except InvalidArgumentError:
            continue
        assert read.size == len(read.elements())  # what was read can be used
    for cut in range(0, len(data), 7):
        with pytest.raises(InvalidArgumentError):
            VariantArray.from_bytes(data[:cut])
    with pytest.raises(InvalidArgumentError):
        VariantArray.from_bytes(data + b"x")


def test_bytes_with_wild_splits_are_refused():
    data = rows(values=VALUES).to_bytes()
    splits = SPLITS.tobytes()
    assert splits in data
    with pytest.raises(InvalidArgumentError):
        VariantArray.from_bytes(data.replace(splits, np.array([0, 9, 3, 3, 6]).tobytes()))
