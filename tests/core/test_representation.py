"""`repr`, `str` and `format` of weft's objects never raise, whatever state the object is in."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import need, to

import weft
from weft import raw_ops
from weft.core.representation import never_raises, repr_of

SPLITS = [0, 2, 5]


class Evil(str):
    """Text, as far as a check of classes can tell, that cannot be shown."""

    def __repr__(self):
        raise ValueError("this object cannot be shown")

    __str__ = __repr__


def shown(x):
    texts = {repr(x), str(x), format(x), f"{x}"}
    assert len(texts) == 1
    return texts.pop()


def of(values):
    return weft.RaggedTensor(values, [SPLITS])


#: Functions that a framework runs with values that are not known.
UNKNOWN = {
    "jax": {
        "jit": lambda f, jax: jax.jit(f),
        "vmap": lambda f, jax: lambda x: jax.vmap(f)(x[None]),
        "grad": lambda f, jax: jax.grad(lambda x: f(x).sum()),
        "jvp": lambda f, jax: lambda x: jax.jvp(f, (x,), (x,)),
        "scan": lambda f, jax: lambda x: jax.lax.scan(lambda carry, row: (f(carry), row), x, x),
        "cond": lambda f, jax: lambda x: jax.lax.cond(True, f, lambda x: x, x),
        "checkpoint": lambda f, jax: jax.grad(jax.checkpoint(lambda x: f(x).sum())),
        "shape": lambda f, jax: lambda x: jax.eval_shape(f, x),
    },
    "torch": {
        "vmap": lambda f, torch: lambda x: torch.vmap(f)(x[None]),
        "grad": lambda f, torch: torch.func.grad(lambda x: f(x).sum()),
        "vmap of grad": lambda f, torch: lambda x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None]),
        "compile": lambda f, torch: torch.compile(f, backend="eager"),
    },
}


@pytest.mark.parametrize(
    ("library", "transform"), [(library, each) for library, transforms in UNKNOWN.items() for each in transforms]
)
def test_under_transformations(library, transform):
    need(library)
    framework = __import__(library)
    seen = []

    def function(x):
        rows = of(x)
        seen.extend([shown(rows), shown(rows.to_variant()), shown(rows * 2), shown(rows[1:])])
        return x * 2

    UNKNOWN[library][transform](function, framework)(to(library, np.arange(5.0, dtype=np.float32)))
    assert all(text.startswith(("RaggedTensor(", "VariantArray(shape=(2,)")) for text in seen)


def test_the_error_of_the_framework_is_seen():
    """And not one of `repr`, in a log line before it."""
    need("jax")
    import jax

    def function(x):
        print(of(x))
        return float(x[0])

    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(function)(jax.numpy.arange(5.0))


def test_tensors_without_values():
    need("torch")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = of(torch.arange(5.0))
    for x in (torch.empty(5, device="meta"), FakeTensorMode().from_tensor(torch.ones(5))):
        rows.flat_values = x
        assert shown(rows) == "RaggedTensor(shape=(2, None), torch torch.float32, 5 values)"


def test_a_deleted_array_of_jax():
    need("jax")
    import jax

    rows = of(jax.numpy.arange(5.0))
    variants = rows.to_variant()
    array = weft.TensorArray(size=5, dtype="float32", element_shape=[]).unstack(rows.flat_values)
    rows.flat_values.delete()
    assert shown(rows) == "RaggedTensor(shape=(2, None), jax float32, 5 values)"
    assert shown(variants).startswith("VariantArray(shape=(2,)")
    assert shown(array).startswith("<TensorArray float32[]")


def test_values_that_were_changed():
    rows, variants = of(np.arange(5.0)), of(np.arange(5.0)).to_variant()
    for flat in (np.ones(3), None, "text", object(), np.array([Evil("a")] * 5, object)):
        rows.flat_values = flat
        assert "RaggedTensor" in shown(rows)
    rows = of(np.array(["a"] * 5, object))
    rows.flat_values[0] = Evil()
    assert shown(rows) == "RaggedTensor(shape=(2, None), numpy object, 5 values)"
    variants._columns = None
    assert shown(variants) == "VariantArray(shape=(2,))"


@pytest.mark.parametrize("kind", [weft.RaggedTensor, weft.VariantArray, weft.TensorArray, weft.Batcher])
def test_an_object_that_is_half_made(kind):
    """As a debugger shows it while its constructor raises."""
    assert f"{kind.__name__} object at" in shown(kind.__new__(kind))


def test_a_subclass_whose_properties_raise():
    class Rows(weft.RaggedTensor):
        @property
        def shape(self):
            raise RuntimeError("no shape")

    assert "Rows object at" in shown(Rows(np.ones(1000), [[0, 1000]]))


def test_arrays_under_jit():
    need("jax")
    import jax

    seen = []

    def function(x):
        array = weft.TensorArray(size=3, dtype="float32", element_shape=[])
        for i in range(3):
            array = array.write(i + (x > 0).astype(int) * 0, x)
            seen.append(shown(array))
        return array

    made = jax.jit(function)(1.0)
    seen.append(shown(made))
    assert all(text.startswith("<TensorArray float32[], size 3") for text in seen)
    for leaf in (None, "leaf", Evil()):  # what functions on pytrees put there
        shown(jax.tree.map(lambda _, leaf=leaf: leaf, made))


def test_batchers():
    class Model:
        @weft.batched
        def predict(self, x):
            return x

        def __repr__(self):
            raise ValueError("no name")

    class Key:
        def __call__(self, *_):
            return 0

        __repr__ = Model.__repr__

    model = Model()
    assert shown(model.predict).startswith("<weft.Batcher")
    assert "Model object at" in shown(model.predict)
    batcher = weft.batched(lambda x: x, key=Key(), max_batch_size=3)
    assert "max_batch_size=3" in shown(batcher.options)
    assert "Key object at" in shown(batcher.options)
    batcher.close()
    assert shown(batcher).startswith("<weft.Batcher")


def test_handles():
    handle, _ = raw_ops.TensorArrayV3(2, "string")
    assert shown(handle).endswith("size 2>")
    raw_ops.TensorArrayCloseV3(handle)
    assert shown(handle).endswith("closed>")


def test_other_exceptions_pass():
    """Not an interrupt that comes while an object is shown."""

    class Interrupted:
        @never_raises
        def __repr__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repr(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        repr_of(Interrupted())
