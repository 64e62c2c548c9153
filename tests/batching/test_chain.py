"""Batch -> model -> Unbatch -> loss in many threads, each with its own backward: the gradients of one batch made by hand."""

from __future__ import annotations

import threading
import time
from itertools import chain

import numpy as np
import pytest
from support.callers import start, start_on, together
from support.chains import FEATURES, OUT, SIZES, W1, W2, answers, batch, close, each, in_order, rng, rows, unbatch
from support.libraries import need

import weft
from weft.errors import DeadlineExceededError, FailedPreconditionError


@pytest.fixture(autouse=True)
def scope():
    need("torch")
    with weft.scope() as scope, weft.gradient_deadline(60):
        yield scope


class Model:
    """A model whose parameters many callers share; with `mixes`, rows depend on each other."""

    def __init__(self, mixes=False, trained=True, device="cpu"):
        self.mixes = mixes
        self.parameters = leaves([W1, W2], trained, device)

    def __call__(self, x):
        h = (x @ self.parameters[0]).tanh()
        if self.mixes:
            h = weft.batch_norm(h, training=True, axis=1).y
        return h @ self.parameters[1]

    def gradients(self):
        return gradients(self.parameters)


def leaves(arrays, needs=True, device="cpu"):
    import torch

    return [torch.tensor(x, requires_grad=needs, device=device) for x in arrays]


def gradients(tensors):
    return [x.grad for x in tensors]


def loss_of(y, w):
    import torch

    return (y * torch.as_tensor(w, device=y.device)).sum() ** 2


def forward(model, x, w, most, **attributes):
    """A caller's loss."""
    made = batch([x], most, **attributes)
    return loss_of(unbatch(model(made.batched_tensors[0]), made), w)


def caller(model, x, w, most, **attributes):
    """A caller from its rows to its gradient."""
    forward(model, x, w, most, **attributes).backward()


def callers_of(model, xs, ws, **attributes):
    return each(lambda x, w: caller(model, x, w, sum(map(len, xs)), **attributes), xs, ws)


def by_hand(mixes, xs, ws, padding=0):
    """The gradients of the sum of all losses through one batch made by hand: of the parameters and of every caller's rows."""
    import torch

    twin, xs = Model(mixes), leaves(xs)
    whole = torch.cat([*xs, xs[0][:1].detach().expand(padding, -1)])
    *pieces, _ = twin(whole).split([*map(len, xs), padding])
    sum(map(loss_of, pieces, ws)).backward()
    return twin.gradients() + gradients(xs)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_gradients_are_those_of_one_batch(sizes):
    model, xs, ws = Model(), rows(sizes), rows(sizes, OUT)
    for turn in range(3):
        mine = leaves(xs)
        answers(together(callers_of(model, mine, ws)))
        wanted = by_hand(False, xs, ws)
        close(gradients(mine), wanted[2:])
        close(model.gradients(), [(turn + 1) * w for w in wanted[:2]])
    assert weft.sweep() == 0


def test_a_model_that_mixes_rows(scope):
    sizes = [1, 3, 2]
    model, xs, ws = Model(mixes=True), rows(sizes), rows(sizes, OUT)
    mine = leaves(xs)
    answers(in_order(scope, callers_of(model, mine, ws)))
    close(model.gradients() + gradients(mine), by_hand(True, xs, ws))


def test_padding_gets_no_gradient(clock):
    sizes = [1, 2, 2]
    model, xs, ws = Model(mixes=True), rows(sizes), rows(sizes, OUT)
    mine = leaves(xs)
    padded = {"allowed_batch_sizes": [4, 8], "batch_timeout_micros": 300_000}
    callers = [start_on(clock, call) for call in each(lambda x, w: caller(model, x, w, 8, **padded), mine, ws)]
    clock.run_out()
    answers(callers)
    close(model.gradients() + gradients(mine), by_hand(True, xs, ws, padding=3))


def test_several_tensors(scope):
    """Three inputs, one of them integers, and two outputs; every caller needs other gradients than the next."""
    import torch

    sizes = [2, 1, 3]
    xs, ys, places = rows(sizes), rows(sizes), [torch.arange(n) for n in sizes]
    needs = [(True, False), (False, True), (False, False)]

    def outputs(model, p, q, r):
        return model(p * r) * q[:, None], p.sin() + r

    def loss(one, two):
        return one.sum() ** 2 + (two**2).sum()

    def call(model, x, y, at):
        made = batch([x, at, y], 6)
        one, two = outputs(model, *made.batched_tensors)
        loss(unbatch(one, made, "one"), unbatch(two, made, "two")).backward()

    model, twin = Model(), Model()
    mine = [leaves([x], a) + leaves([y], b) for x, y, (a, b) in zip(xs, ys, needs, strict=True)]
    answers(in_order(scope, each(lambda pair, at: call(model, *pair, at), mine, places)))
    alone = [leaves(pair) for pair in zip(xs, ys, strict=True)]
    for (x, y), at in zip(alone, places, strict=True):
        loss(*outputs(twin, x, at, y)).backward()
    close(model.gradients(), twin.gradients())
    for got, wanted, needed in zip(*map(chain.from_iterable, (mine, alone, needs)), strict=True):
        assert (got.grad is not None) == needed
        if needed:
            close([got.grad], [wanted.grad])


@pytest.mark.parametrize("needing", [0, 1, 2])
@pytest.mark.parametrize("trained", [True, False])
def test_callers_that_need_none_carry_the_gradients_of_those_that_do(scope, needing, trained):
    """Whether the model is trained or not, and whichever place the only one has whose inputs need a gradient."""
    sizes = [2, 1, 3]
    model, xs, ws = Model(mixes=True, trained=trained), rows(sizes), rows(sizes, OUT)
    mine = [leaves([x], i == needing)[0] for i, x in enumerate(xs)]
    answers(in_order(scope, callers_of(model, mine, ws)))
    wanted = by_hand(True, xs, ws)
    assert [x.grad is not None for x in mine] == [i == needing for i in range(3)]
    close([mine[needing].grad], [wanted[2 + needing]])
    if trained:
        close(model.gradients(), wanted[:2])
    else:
        assert model.gradients() == [None, None]


def test_callers_may_skip_the_model_on_no_rows(scope):
    """Only the caller that has the batch runs the model: the others' outputs still carry their gradient."""
    import torch

    sizes = [2, 1]
    model, xs, ws = Model(), rows(sizes), rows(sizes, OUT)

    def call(x, w):
        made = batch([x], 3)
        (whole,) = made.batched_tensors
        piece = unbatch(model(whole) if len(whole) else torch.empty(0, OUT, dtype=torch.float64), made)
        assert piece.requires_grad
        loss_of(piece, w).backward()

    answers(in_order(scope, each(call, leaves(xs, False), ws)))
    close(model.gradients(), by_hand(False, xs, ws)[:2])


def test_where_nothing_needs_a_gradient_there_is_none(scope):
    made = answers(in_order(scope, each(lambda x: batch([x], 3), leaves(rows([1, 2]), False))))
    pieces = answers(together(each(lambda m: unbatch(m.batched_tensors[0], m), made)))
    assert not any(x.requires_grad for x in [*pieces, *(m.batched_tensors[0] for m in made)])


def test_with_gradients_off_there_is_none(scope):
    import torch

    def call(x):
        with torch.no_grad():
            made = batch([x], 3)
            return unbatch(made.batched_tensors[0], made)

    assert not any(y.requires_grad for y in answers(in_order(scope, each(call, leaves(rows([1, 2]))))))


def test_several_batches_in_flight():
    """Every caller has three batches under way before its first backward, and the batches have different callers."""
    sizes = [1, 2, 1, 2, 1, 1]
    model, ws = Model(), rows(sizes, OUT)
    steps = [leaves(rows(sizes)) for _ in range(3)]

    def call(xs, w):
        made = [batch([x], 4, shared_name=f"step {k}", batch_timeout_micros=5000) for k, x in enumerate(xs)]
        ys = [unbatch(model(m.batched_tensors[0]), m, f"step {k}") for k, m in enumerate(made)]
        for y in ys:
            loss_of(y, w).backward()

    answers(together(each(call, zip(*steps, strict=True), ws)))
    wanted = [by_hand(False, [x.detach().numpy() for x in xs], ws) for xs in steps]
    close(model.gradients(), [sum(w[i] for w in wanted) for i in range(2)])
    for xs, by_step in zip(steps, wanted, strict=True):
        close(gradients(xs), by_step[2:])


def test_one_loss_over_two_batches():
    """The inputs of the second batch come from the first."""
    sizes = [2, 1, 3]
    xs, ws, (square,) = rows(sizes), rows(sizes, OUT), leaves([rng.normal(size=(FEATURES, FEATURES))])
    model, twin, mine, alone = Model(), Model(), leaves(xs), leaves(xs)

    def call(x, w):
        first = batch([x], 6, shared_name="first")
        h = unbatch((first.batched_tensors[0] @ square).sin(), first, "first")
        second = batch([h], 6, shared_name="second")
        loss_of(unbatch(model(second.batched_tensors[0]), second, "second"), w).backward()

    answers(together(each(call, mine, ws)))
    got = [square.grad.clone(), *model.gradients(), *gradients(mine)]
    square.grad = None
    sum(loss_of(twin((x @ square).sin()), w) for x, w in zip(alone, ws, strict=True)).backward()
    close(got, [square.grad, *twin.gradients(), *gradients(alone)])


@pytest.mark.parametrize("linear", [None, 0, 1, 2])
def test_second_order(scope, linear):
    """Gradients of gradients through the chain; the loss of one caller may be linear, its gradient then constant."""
    import torch

    sizes = [2, 1, 2]
    xs, ws = rows(sizes), rows(sizes, OUT)
    model, twin, mine, alone = Model(mixes=True), Model(mixes=True), leaves(xs), leaves(xs)

    def loss(i, y):
        return (y * torch.as_tensor(ws[i])).sum() ** (1 if i == linear else 2)

    def call(i, x):
        made = batch([x], 5)
        y = unbatch(model(made.batched_tensors[0]), made)
        (dx,) = torch.autograd.grad(loss(i, y), x, create_graph=True)
        (dx**2).sum().backward()

    answers(in_order(scope, each(call, range(3), mine)))
    total = sum(map(loss, range(3), twin(torch.cat(alone)).split(sizes)))
    sum((dx**2).sum() for dx in torch.autograd.grad(total, alone, create_graph=True)).backward()
    close(model.gradients() + gradients(mine), twin.gradients() + gradients(alone))


def test_retain_graph(scope):
    """A second backward of all callers gives the same once more."""
    sizes = [2, 1]
    model, xs, ws = Model(), rows(sizes), rows(sizes, OUT)
    mine, turn = leaves(xs), threading.Barrier(2)

    def call(x, w):
        loss = forward(model, x, w, 3)
        loss.backward(retain_graph=True)
        turn.wait(20)
        loss.backward()

    answers(in_order(scope, each(call, mine, ws)))
    close(model.gradients() + gradients(mine), [2 * w for w in by_hand(False, xs, ws)])


@pytest.mark.parametrize("missing", [0, 1])
def test_a_caller_that_never_comes_costs_the_others_the_deadline(scope, missing):
    sizes = [2, 1]
    xs, ws = rows(sizes), rows(sizes, OUT)

    def call(i, x, w):
        loss = forward(Model(), x, w, 3)
        if i != missing:
            loss.backward()

    with weft.gradient_deadline(0.2):
        before = time.monotonic()
        ended = in_order(scope, each(call, range(2), leaves(xs), ws))
        assert time.monotonic() - before < 10
    assert isinstance(ended[1 - missing].error, DeadlineExceededError)
    # The next batch is none the worse for it.
    model, mine = Model(), leaves(xs)
    answers(together(callers_of(model, mine, ws)))
    close(model.gradients() + gradients(mine), by_hand(False, xs, ws))


@pytest.mark.parametrize("covered", [(0, 1, 2), (2, 1, 0), (0, 1), (0, 2), (1, 2)])
def test_a_backward_over_several_callers_is_refused_at_once(scope, covered):
    sizes = [2, 1, 2]
    model, ws = Model(), rows(sizes, OUT)
    losses = answers(in_order(scope, each(lambda x, w: forward(model, x, w, 5), leaves(rows(sizes)), ws)))
    with pytest.raises(FailedPreconditionError, match="must not cover several callers"):
        start(lambda: sum(losses[i] for i in covered).backward()).answer(5)
    assert scope.stored() == 0


def test_a_backward_over_several_callers_of_batch_alone_is_refused_at_once(scope):
    """Without Unbatch, too, rows wait for the caller that has the batch."""
    made = answers(in_order(scope, each(lambda x: batch([x], 3), leaves(rows([1, 2])))))
    with pytest.raises(FailedPreconditionError, match="must not cover several callers"):
        start(lambda: sum(m.batched_tensors[0].sum() for m in made).backward()).answer(5)


def test_outputs_without_elements_have_no_gradient_to_gather(scope):
    mine = leaves(rows([1, 2]))

    def call(x):
        made = batch([x], 3)
        unbatch(made.batched_tensors[0][:, :0], made).sum().backward()

    answers(in_order(scope, each(call, mine)))
    close(gradients(mine), [np.zeros((1, FEATURES)), np.zeros((2, FEATURES))])
    assert scope.stored() == 0


def test_hooks_see_the_gradients(scope):
    sizes, seen = [2, 1], []
    xs, ws = rows(sizes), rows(sizes, OUT)
    mine = leaves(xs)

    def call(x, w):
        made = batch([x], 3)
        made.batched_tensors[0].register_hook(lambda g: seen.append(tuple(g.shape)))
        y = unbatch(Model()(made.batched_tensors[0]), made)
        y.register_hook(lambda g: 2 * g)
        loss_of(y, w).backward()

    answers(in_order(scope, each(call, mine, ws)))
    assert sorted(seen) == [(0, FEATURES), (3, FEATURES)]
    close(gradients(mine), [2 * w for w in by_hand(False, xs, ws)[2:]])


def test_a_thread_without_autocast_is_told_what_differs(scope):
    """Autocast belongs to a thread; under it in all of them, the chain keeps its types."""
    import torch

    w = torch.randn(FEATURES, OUT, requires_grad=True)

    def call(x, enabled):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            made = batch([x], 3)
            y = unbatch(made.batched_tensors[0] @ w, made)
        y.float().sum().backward()
        return y.dtype

    mine = [x.float().detach().requires_grad_() for x in leaves(rows([1, 2]))]
    assert answers(in_order(scope, each(call, mine, [True, True]))) == [torch.bfloat16] * 2
    for x in mine:
        np.testing.assert_allclose(x.grad, w.detach().sum(1).expand(len(x), -1), rtol=0.02, atol=0.02)
    with weft.gradient_deadline(0.2):
        one, _ = in_order(scope, each(call, mine, [False, True]))
    with pytest.raises(weft.errors.InvalidArgumentError, match="dtype"):
        one.answer()


def test_the_functional_transform(scope):
    """`torch.func.grad` in each caller."""
    import torch

    sizes = [2, 1]
    xs, ws = rows(sizes), rows(sizes, OUT)
    model = Model(trained=False)
    got = answers(in_order(scope, each(lambda x, w: torch.func.grad(lambda x: forward(model, x, w, 3))(x),
                                       leaves(xs, False), ws)))  # fmt: skip
    close(got, by_hand(False, xs, ws)[2:])


def test_a_lone_caller_passes_gradcheck():
    import torch

    def chain(x, y):
        made = batch([x, y], 4, batch_timeout_micros=0, allowed_batch_sizes=[4])
        p, q = made.batched_tensors
        return unbatch(p.sin() * q, made)

    given = leaves(rows([3, 3]))
    assert torch.autograd.gradcheck(chain, given)
    assert torch.autograd.gradgradcheck(chain, given)


@pytest.mark.slow
def test_many_callers_for_a_while():
    """64 callers, batches of whatever comes, a hundred turns."""
    sizes = [1 + i % 3 for i in range(64)]
    model, ws = Model(), rows(sizes, OUT)
    for _ in range(100):
        xs = rows(sizes)
        mine = leaves(xs)
        for w in model.parameters:
            w.grad = None
        answers(together(each(lambda x, w: caller(model, x, w, 40, batch_timeout_micros=2000), mine, ws)))
        wanted = by_hand(False, xs, ws)
        close(gradients(mine), wanted[2:])
        for got, right in zip(model.gradients(), wanted, strict=False):
            np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9)
    assert weft.sweep() == 0


@pytest.mark.cuda
class TestDevice:
    """PyTorch runs all backwards of a device on one thread; the callers wait in their own."""

    @pytest.mark.parametrize("mixes", [False, True])
    def test_callers_wait_for_each_other(self, scope, mixes):
        sizes = [2, 1, 3]
        model, xs, ws = Model(mixes, device="cuda"), rows(sizes), rows(sizes, OUT)
        mine = leaves(xs, device="cuda")
        answers(in_order(scope, each(lambda x, w: caller(model, x, w, 6), mine, ws)))
        got = [g.cpu() for g in model.gradients() + gradients(mine)]
        for a, b in zip(got, by_hand(mixes, xs, ws), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)

    def test_a_lone_caller(self):
        model, (x,), ws = Model(device="cuda"), leaves(rows([2]), device="cuda"), rows([2], OUT)
        caller(model, x, ws[0], 2)
        assert x.grad.device.type == "cuda"

    def test_a_backward_over_several_callers_is_refused(self, scope):
        sizes = [2, 1]
        model, ws = Model(device="cuda"), rows(sizes, OUT)
        calls = each(lambda x, w: forward(model, x, w, 3), leaves(rows(sizes), device="cuda"), ws)
        total = sum(answers(in_order(scope, calls)))
        with pytest.raises(FailedPreconditionError, match="must not cover several"):
            total.backward()
