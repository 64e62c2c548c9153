"""Programs that change arrays while weft uses them, run in a process of their own: `python attacks.py library seconds name ...`.

A program fails unless weft gives right results or refuses with errors of its own; those that failed make the exit code 1. A crash
ends the process, and the last line of the output says in which program.
"""

from __future__ import annotations

import inspect
import pickle
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

import weft
from weft import RaggedTensor, VariantArray, raw_ops

HUGE = 10**10
SECONDS = float(sys.argv[2]) if __name__ == "__main__" else 0.7  # of each race


def to(library, x):
    """`x` in memory of its own, as an array of `library`."""
    x = np.array(x)
    if library == "torch":
        import torch

        return torch.from_numpy(x)
    return x


def numbers(x):
    return np.asarray(x).tolist()


@contextmanager
def meanwhile(*changes):
    """Another thread runs `changes` again and again."""
    stop = threading.Event()

    def run():
        while not stop.is_set():
            for change in changes:
                with suppress(ValueError, RuntimeError):  # the library refuses to resize what is in use
                    change()

    thread = threading.Thread(target=run, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def race(*calls, seconds=SECONDS):
    """Call all `calls` in turn for a while; weft may refuse, with an error of its own."""
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end or not done:
        for call in calls:
            with suppress(weft.errors.OpError):
                call()
        done += 1


def refused(call):
    """`call` must be refused with an error of weft's."""
    try:
        call()
    except weft.errors.OpError:
        return
    raise AssertionError(f"not refused: {inspect.getsource(call)}")


def allowed(call):
    """`call` gives something, or is refused with an error of weft's."""
    with suppress(weft.errors.OpError):
        call()


# ---- the caller changes what it gave


def caller_changes_splits(library):
    values = to(library, np.arange(5.0))
    inner = to(library, [0, 1, 3, 5])
    made = {
        "row_splits": lambda s: RaggedTensor.from_row_splits(values, s),
        "nested": lambda s: RaggedTensor(values, [to(library, [0, 3]), s]),
        "outer": lambda s: RaggedTensor(values, [s, to(library, [0, 1, 2, 3, 4, 5])]),
        "ragged values": lambda s: RaggedTensor.from_row_splits(values, s).with_values(values),
        "cu_seqlens": lambda s: RaggedTensor.from_cu_seqlens(values, s),
        "variant": lambda s: RaggedTensor.from_variant(raw_ops.RaggedTensorToVariant([s], values, True)),
        "element": lambda s: RaggedTensor.from_variant(VariantArray([([s], values)], ()), 1),
        "pickled": lambda s: pickle.loads(pickle.dumps(RaggedTensor.from_row_splits(values, s))),
    }
    for name, make in made.items():
        splits = to(library, [0, 2, 2, 5])
        rt = make(splits)
        before = numbers_of(rt)
        splits[1:] = HUGE
        assert numbers_of(rt) == before, name
    for make, given in (
        (RaggedTensor.from_row_lengths, [2, 0, 3]),
        (RaggedTensor.from_row_ids, [0, 0, 2, 2, 2]),
    ):
        given = to(library, given)
        rt = make(values, given)
        given[:] = HUGE
        assert numbers(rt.sum()) == [1.0, 0.0, 9.0]
    nested = RaggedTensor.from_row_splits(RaggedTensor.from_row_splits(values, inner), to(library, [0, 1, 3]))
    inner[:] = HUGE
    assert numbers(nested.sum().flat_values) == [0.0, 3.0, 7.0]
    data = bytearray(raw_ops.RaggedTensorToVariant([to(library, [0, 2, 2, 5])], values, True).to_bytes())
    variant = VariantArray.from_bytes(data)
    data[:] = b"\x7f" * len(data)
    assert numbers(raw_ops.RaggedTensorFromVariant(variant, 0, 1, "float64").output_nested_splits[0]) == [0, 2, 2, 5]


def numbers_of(rt):
    """What every method says of a ragged tensor."""
    flat = rt.sum()
    flat = flat.flat_values if isinstance(flat, RaggedTensor) else flat
    padded = rt.to_padded(value=-1)
    return [
        rt.to_list(), numbers(flat), numbers(padded.values), rt.gather(np.arange(len(rt))[::-1]).to_list(),
        rt.softmax().to_list(), [numbers(s) for s in rt.nested_row_splits],
    ]  # fmt: skip


def caller_changes_what_it_got(library):
    values = to(library, np.arange(5.0))
    rt = RaggedTensor(values, [to(library, [0, 3]), to(library, [0, 2, 2, 5])])
    variant = raw_ops.RaggedTensorToVariant(rt.nested_row_splits[1:], values, True)
    before = numbers_of(rt)
    got = [
        rt.row_splits, *rt.nested_row_splits, rt.values.row_splits, rt.row_lengths(), rt.values.row_lengths(),
        *raw_ops.RaggedTensorFromVariant(variant, 0, 1, "float64").output_nested_splits,
        *rt.gather([0]).nested_row_splits, *(s for e in variant.elements() for s in e.splits),
    ]  # fmt: skip
    with suppress(ImportError):
        got.append(np.asarray(rt.to_awkward().layout.offsets))
    with suppress(ImportError):
        got.append(rt.to_arrow().offsets.to_numpy())
    for array in got:
        overwrite(array)
    assert numbers_of(rt) == before
    assert RaggedTensor.from_variant(variant).to_list() == before[0][0]


def overwrite(array):
    """Write to an array and to all that it is a view of, as far as the library allows it."""
    if not isinstance(array, np.ndarray):
        array.fill_(HUGE)
        return
    while isinstance(array, np.ndarray):
        with suppress(ValueError):
            array.flags.writeable = True
        with suppress(ValueError):
            array[...] = HUGE
        with suppress(ValueError, AttributeError):
            array.resize(array.size + 100, refcheck=False)
        with suppress(ValueError, AttributeError, DeprecationWarning):
            array.dtype = np.int16
        with suppress(ValueError, AttributeError, DeprecationWarning):
            array.shape = (1, *array.shape)
        array = array.base


# ---- the caller resizes what it gave


RESIZED = {
    "numpy": [lambda x: x.resize((1,), refcheck=False), lambda x: x.resize((0,), refcheck=False)],
    "torch": [
        lambda x: x.resize_(1), lambda x: x.resize_(0), lambda x: x.set_(), lambda x: x.untyped_storage().resize_(0),
        lambda x: x.untyped_storage().resize_(8), lambda x: setattr(x, "data", x[:1].clone()),
    ],
}  # fmt: skip


def fresh(library, size, dtype="float64"):
    """An array in memory that can be resized."""
    if library == "torch":
        import torch

        return torch.ones(size, dtype=getattr(torch, dtype))
    return np.ones(size, dtype)


def caller_resizes_values(library):
    for resize in RESIZED[library]:
        for size in (5, 100_000):
            values = fresh(library, size)
            rt = RaggedTensor.from_row_splits(values, to(library, [0, 2, 2, size]))
            try:
                resize(values)
            except (ValueError, RuntimeError):
                continue
            for call in (
                rt.sum, rt.max, rt.mean, rt.softmax, rt.to_padded, rt.to_list, rt.to_variant, lambda rt=rt: rt[2],
                lambda rt=rt: rt[1:], lambda rt=rt: rt[:, :1], lambda rt=rt: rt.gather([0, 2]),
                lambda rt=rt: rt * 2, lambda rt=rt: list(rt),
            ):  # fmt: skip
                # Where only the storage is smaller, torch's own arithmetic reads past its end: only kernels are called.
                if tuple(values.shape) != (size,) or call in (rt.sum, rt.max, rt.mean, rt.softmax):
                    refused(call)


def caller_resizes_splits(library):
    """Splits, indices and vectors that lie in a storage that is too small."""
    import torch

    values, good = fresh("torch", 5), to("torch", [0, 2, 2, 5])
    for size in (0, 8):
        splits, index = (torch.tensor(x) for x in ([0, 2, 2, 5], [0, 1, 2]))
        for x in (splits, index):
            x.untyped_storage().resize_(size)
        refused(lambda s=splits: RaggedTensor.from_row_splits(values, s))
        refused(lambda i=index: raw_ops.RaggedGather([good], values, i, 1))
        refused(lambda s=splits: raw_ops.RaggedTensorToTensor([-1, -1], values, 0.0, [s], ["ROW_SPLITS"]))
        refused(lambda i=index: RaggedTensor.from_row_lengths(np.ones(3), i))


# ---- another thread flips numbers


def flips(x, *places):
    """What makes some numbers of `x` wrong, and what makes them right again."""
    good = x.tolist()
    where = places or (len(x) - 1,)

    def spoil(value):
        def change():
            for i in where:
                x[i] = value

        return change

    def mend():
        for i in where:
            x[i] = int(good[i])

    return spoil(HUGE), mend, spoil(-HUGE), mend


def other_thread_flips_splits(library):
    rows = 2000
    splits = to(library, np.arange(rows + 1) * 3)
    inner = to(library, np.arange(3 * rows + 1))
    values = fresh(library, 3 * rows)
    like = raw_ops.RaggedTensorToVariant([to(library, np.arange(rows + 1) * 3)], values, True)
    partly = VariantArray([None, *(np.ones(3) for _ in range(rows - 1))])
    index = np.arange(rows)
    calls = [
        lambda: raw_ops.RaggedTensorToTensor([-1, 4], values, 0.0, [splits], ["ROW_SPLITS"]),
        lambda: raw_ops.RaggedTensorToTensor([-1, 4, 2], values, 0.0, [splits, inner], ["ROW_SPLITS", "ROW_SPLITS"]),
        lambda: raw_ops.RaggedGather([splits], values, index, 1),
        lambda: raw_ops.RaggedGather([splits, inner], values, index, 2),
        lambda: raw_ops.RaggedTensorToSparse([splits], values),
        lambda: raw_ops.RaggedTensorToVariant([splits], values, True),
        lambda: raw_ops.RaggedTensorToVariantGradient(like, splits, [3 * rows], "float64"),
        lambda: raw_ops.RaggedTensorToVariantGradient(partly, splits, [3 * rows], "float64"),
        lambda: raw_ops.RaggedBincount(splits, to(library, np.zeros(3 * rows, np.int64)), 3, values),
        lambda: RaggedTensor.from_row_splits(values, splits).sum(),
        lambda: RaggedTensor.from_row_splits(values, splits).softmax(),
        lambda: RaggedTensor.from_row_splits(values, splits).to_padded(),
        lambda: list(RaggedTensor.from_row_splits(values, splits)[:10]),
        lambda: weft.vjp(raw_ops.RaggedGather, [splits], values, index, 1)[1](output_dense_values=values),
        lambda: weft.vjp(raw_ops.RaggedTensorToTensor, [-1, 4], values, 0.0, [splits], ["ROW_SPLITS"])[1](
            fresh(library, (rows, 4))
        ),
    ]
    for x, places in ((splits, (1, rows // 2, rows)), (inner, (5, 3 * rows))):
        with meanwhile(*flips(x, *places)):
            race(*calls, seconds=4 * SECONDS)


def other_thread_flips_indices(library):
    rows = 2000
    splits = to(library, np.arange(rows + 1) * 3)
    values = fresh(library, 3 * rows)
    ids = to(library, np.repeat(np.arange(rows), 3))
    places = to(library, np.arange(3 * rows))
    index = to(library, np.arange(rows))
    small = to(library, np.arange(rows, dtype=np.int32))
    lengths = to(library, np.full(rows, 3))
    words = to(library, np.zeros(3 * rows, np.int64))
    pairs = np.stack([np.arange(rows), np.arange(rows)], 1)
    array = weft.TensorArray("float64", rows, clear_after_read=False).unstack(fresh(library, (rows, 2)))
    rt = RaggedTensor.from_row_splits(values, splits)

    def scatter():
        handle = raw_ops.TensorArrayV3(rows, "float64").handle
        raw_ops.TensorArrayScatterV3(handle, small, fresh(library, (rows, 2)), 0.0)

    def split():
        handle = raw_ops.TensorArrayV3(rows, "float64").handle
        raw_ops.TensorArraySplitV3(handle, values, lengths, 0.0)

    calls = {
        "index": [lambda: raw_ops.RaggedGather([splits], values, index, 1), lambda: rt.gather(index), lambda: rt[index]],
        "ids": [
            lambda: raw_ops.RaggedFillEmptyRows(ids, values, np.int64(rows), 0.0),
            lambda: RaggedTensor.from_row_ids(values, ids, rows).sum(),
            lambda: raw_ops.RaggedTensorToTensor(
                [rows, -1], values, 0.0, [np.int64(rows), ids], ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]
            ),
        ],
        "places": [lambda: raw_ops.RaggedFillEmptyRowsGrad(places, values)],
        "small": [scatter, lambda: array.gather(small)],
        "lengths": [
            split, lambda: RaggedTensor.from_row_lengths(values, lengths).sum(),
            lambda: RaggedTensor.from_padded(fresh(library, (rows, 4)), lengths=lengths),
        ],
        "words": [lambda: raw_ops.RaggedBincount(splits, words, 3, values)],
        "pairs": [
            lambda: raw_ops.RaggedCross(
                [], [], [pairs], [np.arange(rows)], [np.array([rows, rows])], [], "S", True, 0, 0, "int64", "int64"
            )
        ],
    }  # fmt: skip
    flat = {"index": index, "ids": ids, "places": places, "small": small, "lengths": lengths, "words": words}
    for name, x in {**flat, "pairs": pairs}.items():
        changes = (
            flips(x, 3, rows // 2, len(x) - 1) if x.ndim == 1 else (lambda: pairs.fill(HUGE), lambda: pairs.fill(1))
        )
        if name == "small":
            changes = (lambda: small.__setitem__(7, 2**31 - 1), lambda: small.__setitem__(7, 7))
        with meanwhile(*changes):
            race(*calls[name])


def other_thread_flips_batch_index(library):
    rows = 64
    index = to(library, np.stack([np.arange(1, rows + 1), np.arange(rows), np.ones(rows, np.int64)], 1))
    data = fresh(library, (rows, 3))
    given = np.int64(1)

    def unbatch():
        with weft.scope():
            raw_ops.Unbatch(data, index, given, timeout_micros=10**5)

    def gradient():
        with weft.scope():
            _, pull = weft.vjp(raw_ops.Unbatch, data, index[:1], given, timeout_micros=10**5)
            pull(fresh(library, (1, 3)))

    def spoil():
        index[0, 1] = HUGE
        index[5, 2] = HUGE

    def mend():
        index[0, 1] = 0
        index[5, 2] = 1

    with meanwhile(spoil, mend):
        race(unbatch, gradient, seconds=2 * SECONDS)


# ---- another thread resizes values


def resizes(library, x):
    """What makes `x` small and large again, as often as its library allows."""
    size = len(x)
    if library == "numpy":
        return (lambda: x.resize((size // 100,), refcheck=False), lambda: x.resize((size,), refcheck=False))
    import torch

    other, whole = torch.ones(size // 100, dtype=x.dtype), torch.ones(size, dtype=x.dtype)
    return (
        lambda: x.resize_(size // 100),
        lambda: x.set_(other),
        lambda: x.set_(whole.clone()),
        lambda: x.resize_(size),
    )


def other_thread_resizes_values(library):
    size = 600_000
    splits = to(library, np.append(np.arange(0, size, 6), size))
    index = np.arange(len(splits) - 1)[::-1].copy()
    values = fresh(library, size)
    calls = [
        lambda: RaggedTensor.from_row_splits(values, splits).sum(),
        lambda: RaggedTensor.from_row_splits(values, splits).max(),
        lambda: RaggedTensor.from_row_splits(values, splits).softmax(),
        lambda: raw_ops.RaggedGather([splits], values, index, 1),
        lambda: raw_ops.RaggedTensorToTensor([-1, 6], values, 0.0, [splits], ["ROW_SPLITS"]),
        lambda: raw_ops.RaggedTensorToTensor([-1, 3], values, 0.0, [splits], ["ROW_SPLITS"]),
    ]
    for change in zip(resizes(library, values), strict=True):
        with meanwhile(*change, *resizes(library, values)):
            race(*calls)


def other_thread_resizes_what_batch_norm_reads(library):
    """The arrays themselves: memory behind a view that the caller took before cannot be guarded (docs/differences.md)."""
    rows, channels = 4000, 64
    vector, fixed = fresh(library, channels, "float32"), fresh(library, channels, "float32")
    shapes = [(rows, channels), (8, channels)]  # with and without the interpreter lock
    if library == "numpy":
        shapes.append((rows, 1, 1, channels))
    for shape in shapes:
        x = fresh(library, shape, "float32")
        resize = partial(x.resize, refcheck=False) if library == "numpy" else lambda size, x=x: x.resize_(size)
        sizes = [(shape[0] // 2, *shape[1:]), shape]
        if library == "numpy":
            others = [lambda: vector.resize((1,), refcheck=False), lambda: vector.resize((channels,), refcheck=False)]
        else:
            others = [lambda: vector.resize_(1), lambda: vector.resize_(channels)]
        calls = [
            lambda x=x: weft.batch_norm(x, vector, fixed, training=True),
            lambda x=x: weft.batch_norm(x, fixed, fixed, vector, fixed, training=False),
        ]
        if len(shape) == 4:
            calls = [lambda x=x: raw_ops.FusedBatchNormV3(x, vector, fixed, vector, vector)]
        for change in ([partial(resize, size) for size in sizes], others):
            with meanwhile(*change):
                race(*calls)


def other_thread_resizes_what_a_tensor_array_reads(library):
    rows = 2000
    value = fresh(library, (rows, 600))
    if library == "numpy":
        changes = (lambda: value.resize((3, 600), refcheck=False), lambda: value.resize((rows, 600), refcheck=False))
    else:  # what torch copies is copied by torch, see docs/differences.md
        changes = (lambda: None,)
    indices = np.arange(rows)[::-1].astype(np.int32)

    def scatter():
        handle = raw_ops.TensorArrayV3(rows, "float64").handle
        raw_ops.TensorArrayScatterV3(handle, indices, value, 0.0)

    def split():
        handle = raw_ops.TensorArrayV3(rows, "float64").handle
        raw_ops.TensorArraySplitV3(handle, value, np.ones(rows, np.int64), 0.0)

    with meanwhile(*changes):
        race(scatter, split)


# ---- hooks change what a module of torch holds


def hooks_change_running_statistics(library):
    import torch

    def change(module, how):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            with suppress(RuntimeError):  # torch does not resize what weft has read in place
                how(getattr(module, name))

    def resized(x):
        x.resize_(0)

    def longer(x):
        x.resize_(100_000)

    def other(x):
        x.set_()

    def emptied(x):
        x.untyped_storage().resize_(0)

    def shrunk(x):
        x.untyped_storage().resize_(4)

    def retyped(x):
        x.data = torch.zeros(1, dtype=torch.int8)

    for how in (resized, longer, other, emptied, shrunk, retyped):
        for channels in (4, 300):
            for cumulative in (False, True):
                module = weft.torch.BatchNorm(channels, cumulative=cumulative)
                x = torch.randn(16, channels, requires_grad=True)
                with (
                    torch.autograd.graph.saved_tensors_hooks(
                        lambda t, module=module, how=how: (change(module, how), t)[1], lambda t: t
                    ),
                    suppress(weft.errors.OpError),
                ):  # a hook that runs after the update does not matter to this call
                    module(x)
                refused(lambda module=module, x=x: module(x))
                refused(lambda module=module, x=x: module.eval()(x))


def hooks_change_parameters(library):
    import torch

    for name in ("weight", "bias", "running_mean", "running_var"):
        for how in (
            lambda x: x.resize_(0), lambda x: x.resize_(7), lambda x: x.untyped_storage().resize_(0),
            lambda x: x.untyped_storage().resize_(8), lambda x: setattr(x, "data", x.data.to_sparse()),
            lambda x: setattr(x, "data", torch.empty(300, device="meta")),
        ):  # fmt: skip
            module = weft.torch.BatchNorm(300)

            def hook(module, inputs, how=how, name=name):
                with torch.no_grad(), suppress(RuntimeError):
                    how(getattr(module, name))

            module.register_forward_pre_hook(hook)
            x = torch.randn(16, 300, requires_grad=True)
            allowed(lambda module=module, x=x: module(x))
            allowed(lambda module=module, x=x: module.eval()(x))


def hooks_change_saved_tensors(library):
    import torch

    for unpack in (
        lambda t: t[:1] if t.ndim else t, lambda t: t.reshape(-1)[:1], lambda t: t.clone().resize_(0), lambda t: t.double(),
        lambda t: torch.zeros(0), lambda t: t.new_ones([2 * n for n in t.shape]),
    ):  # fmt: skip
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            x = torch.randn(64, 300, requires_grad=True)
            y = weft.torch.BatchNorm(300)(x)
            values = torch.randn(100, requires_grad=True)
            rt = RaggedTensor.from_row_splits(values, [0, 50, 100])
            outputs = [y, rt.gather([1, 0, 1]).flat_values, rt.to_padded(length=3).values, rt.softmax().flat_values]
            outputs += [rt.max(), rt[:, :2].flat_values, rt.sum()]
        for output in outputs:
            with suppress(weft.errors.OpError, RuntimeError):  # torch itself checks the shapes of gradients
                output.sum().backward()


def main():
    _, library, _, *names = sys.argv
    if library == "torch":
        import torch

        import weft.torch  # noqa: F401

        torch.manual_seed(0)
    failed = 0
    for name in names:
        print(name, flush=True)
        try:
            globals()[name](library)
        except BaseException:
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
