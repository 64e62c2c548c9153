"""Awkward values and awkward functions in batches."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support.bad_calls import X, batch, check_untouched, check_usable, function, unbatch, unbatch_grad
from support.callers import start_on
from support.libraries import back, need, to

import weft
from weft import raw_ops
from weft.errors import InvalidArgumentError


class TestAwkwardValues:
    """Arrays that look fine until someone uses them."""

    def test_sparse_tensors(self, clock):
        need("torch")
        import torch

        with weft.scope(clock) as scope:
            for call in (
                lambda x: batch([x]),
                lambda x: function([x]),
                lambda x: unbatch(x, [[7, 0, 1]]),
                lambda x: unbatch_grad(x, [[7, 0, 2]], x),
            ):
                with pytest.raises(InvalidArgumentError):
                    call(torch.eye(2).to_sparse())
                with pytest.raises(InvalidArgumentError):
                    call(torch.ones(2, 2, device="meta"))
            check_untouched(scope)

    def test_quantized_tensors(self, clock):
        need("torch")
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
        with weft.scope(clock) as scope:
            with pytest.raises(InvalidArgumentError):
                batch([x])
            check_untouched(scope)

    def test_traced_arrays(self, clock):
        need("jax")
        import jax

        with weft.scope(clock) as scope:
            with pytest.raises(InvalidArgumentError, match=r"jax\.jit"):
                jax.jit(lambda x: batch([x], max_batch_size=2).batched_tensors[0])(X)
            with pytest.raises(InvalidArgumentError, match=r"jax\.jit"):
                jax.jit(lambda x: unbatch(x, [[7, 0, 2]]))(X)
            check_untouched(scope)

    def test_libraries_do_not_mix_in_a_call(self, clock):
        need("torch")
        x = to("torch", X)
        with weft.scope(clock) as scope:
            for call in (lambda: batch([X, x]), lambda: function([x, X]), lambda: unbatch_grad(X, grad=x)):
                with pytest.raises(InvalidArgumentError):
                    call()
            check_untouched(scope)

    def test_deleted_arrays(self, clock):
        need("jax")
        import jax.numpy as jnp

        gone = jnp.ones((2, 3))
        gone.delete()
        bad, good = (start_on(clock, batch, [x], batch_timeout_micros=1000) for x in (gone, jnp.ones((2, 3))))
        clock.run_out()
        assert isinstance(bad.end().error, InvalidArgumentError)
        assert back(good.answer().batched_tensors[0]).sum() == 6

    def test_a_ragged_list(self, clock):
        with weft.scope(clock) as scope:
            with pytest.raises(ValueError):
                batch([[[1.0], [2.0, 3.0]]])
            check_untouched(scope)

    def test_an_array_whose_copy_fails(self, clock):
        """An object array hides nothing: text or refused."""
        with pytest.raises(InvalidArgumentError):
            batch([np.array([object(), "a"], object)])


class TestAwkwardFunctions:
    def test_exceptions_that_cannot_be_copied(self, clock):
        class Awkward(Exception):
            def __new__(cls, *, code):
                return super().__new__(cls)

            def __init__(self, *, code):
                super().__init__()
                self.code = code

        class Stubborn(Exception):
            def __copy__(self):
                return self

        class Layout(OSError):
            def __init__(self, *, code):
                super().__init__(2, "missing")
                self.code = code

        class Hostile(Exception):
            def __copy__(self):
                raise SystemError

            def __reduce_ex__(self, protocol):
                raise SystemError

        decoding = UnicodeDecodeError("utf-8", b"", 0, 1, "reason")
        for raised in (
            Awkward(code=3),
            Stubborn(),
            Layout(code=3),
            Hostile(),
            decoding,
            ExceptionGroup("g", [KeyError()]),
        ):

            def f(x, raised=raised):
                raise raised

            callers = [start_on(clock, function, f=f, batch_timeout_micros=1000) for _ in range(3)]
            clock.run_out()
            found = [caller.end().error for caller in callers]
            assert len({id(error) for error in [*found, raised]}) == 4
            for error in found:
                assert isinstance(error, (type(raised), weft.errors.UnknownError))
                assert error.__cause__ is raised
        check_usable(clock, warns=True)

    def test_notes_are_each_callers_own(self, clock):
        def f(x):
            error = ValueError("no")
            error.add_note("from f")
            raise error

        callers = [start_on(clock, function, f=f, batch_timeout_micros=1000) for _ in range(2)]
        clock.run_out()
        a, b = (caller.end().error for caller in callers)
        a.add_note("mine")
        assert b.__notes__ == ["from f"]

    def test_unhashable_functions_are_told_apart(self, clock):
        class Scale:
            __hash__ = None

            def __init__(self, factor):
                self.factor = factor

            def __call__(self, x):
                return x * np.float32(self.factor)

        callers = [start_on(clock, function, f=Scale(i), batch_timeout_micros=1000) for i in range(3)]
        clock.run_out()
        assert [caller.answer()[0][0, 0] for caller in callers] == [0.0, 1.0, 2.0]

    def test_an_equality_that_raises_hurts_nobody(self, clock):
        class Rude:
            def __hash__(self):
                return 1

            def __eq__(self, other):
                if isinstance(other, Rude):
                    raise RuntimeError("rude")
                return False

            def __call__(self, x):
                return x

        first = start_on(clock, function, f=Rude(), batch_timeout_micros=1000)
        second = start_on(clock, function, f=Rude(), batch_timeout_micros=1000)
        clock.run_out()
        assert first.answer()[0].tolist() == X.tolist()
        assert second.answer()[0].tolist() == X.tolist()
        check_usable(clock, warns=True)

    def test_methods_of_one_object_share_a_batch(self, clock):
        class Model:
            def __init__(self):
                self.sizes = []

            def run(self, x):
                self.sizes.append(len(x))
                return x

        model = Model()
        callers = [start_on(clock, lambda: function(f=model.run, batch_timeout_micros=1000)) for _ in range(3)]
        clock.run_out()
        assert [caller.answer()[0].shape for caller in callers] == [(2, 3)] * 3
        assert model.sizes == [6]


class TestVjp:
    def test_an_op_without_gradient_is_not_run(self, clock):
        ran = []
        with weft.scope(clock) as scope:
            with pytest.raises(LookupError):
                weft.vjp(raw_ops.BatchFunction, [X], [], lambda x: ran.append(1) or x, 1, 2, 0, ["float32"])
            assert ran == []
            assert scope.resources == {}

    def test_cotangents(self, clock):
        _, pull_back = weft.vjp(raw_ops.Unbatch, X, [[7, 0, 2]], 7, 0)
        with pytest.raises(TypeError):
            pull_back(X, X)
        with pytest.raises(TypeError):
            pull_back(unbatched=X)

    def test_notes(self, clock):
        with pytest.raises(InvalidArgumentError) as caught:
            weft.vjp(raw_ops.Unbatch, X, [[7, 0, 3]], 7, 0)
        assert caught.value.__notes__[0].startswith("in weft.raw_ops.Unbatch(batched_tensor: float32[2, 3], ")
