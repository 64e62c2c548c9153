"""Gradients of batched calls in torch: exact against one batch made by hand, and no wait that cannot end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from batched_calls import FULL
from callers import PATIENCE, start, start_on, together, until

import weft
from weft.errors import DeadlineExceededError, FailedPreconditionError

torch = pytest.importorskip("torch")

SIZES = [1, 3, 2, 5]
ROWS = sum(SIZES)


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()


def inputs(sizes=SIZES, grad=True):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 4, dtype=torch.double, generator=generator).requires_grad_(grad) for n in sizes]


def loss(y, i):
    return (y * (i + 1)).square().sum()


def expected(net, xs, f=None):
    """The gradients of parameters and inputs: of the sum of all losses, over one batch made by hand."""
    rows = [x.detach().clone().requires_grad_() for x in xs]
    out = (f or net)(torch.cat(rows))
    sum(loss(y, i) for i, y in enumerate(out.split([len(x) for x in xs]))).backward()
    found = [p.grad.clone() for p in net.parameters()], [x.grad for x in rows]
    net.zero_grad()
    return found


def close(net, xs, want):
    """Whether parameters and inputs have the gradients they should."""
    for p, grad in zip(net.parameters(), want[0], strict=True):
        torch.testing.assert_close(p.grad, grad)
    for x, grad in zip(xs, want[1], strict=True):
        if x.requires_grad and x.is_leaf:
            torch.testing.assert_close(x.grad, grad)


def go(policy, xs, back=lambda y, i: loss(y, i).backward()):
    """Call and go back, each in its own thread, in one batch."""
    callers = together([lambda x=x, i=i: back(policy(x), i) for i, x in enumerate(xs)])
    return [caller.answer() for caller in callers]


class TestExact:
    def test_one_backward_of_the_summed_losses(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        go(policy, xs)
        close(net, xs, want)
        seen = policy.statistics()
        assert (seen.sizes, seen.backwards) == ({ROWS: 1}, 1)

    def test_when_backward_returns_the_gradients_are_whole(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)

        def back(y, i):
            loss(y, i).backward()
            return [p.grad.clone() for p in net.parameters()]

        for seen in go(policy, xs, back):
            for grad, right in zip(seen, want[0], strict=True):
                torch.testing.assert_close(grad, right)

    def test_inputs_that_need_none(self, scope, net):
        xs = inputs(grad=False)
        want = expected(net, xs)
        go(weft.batched(net, max_batch_size=ROWS, **FULL), xs)
        close(net, xs, want)
        assert all(x.grad is None for x in xs)

    def test_inputs_that_were_computed(self, scope, net):
        leaves = inputs()
        want = expected(net, [x * 2 for x in leaves])
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        callers = together([lambda x=x, i=i: loss(policy(x * 2), i).backward() for i, x in enumerate(leaves)])
        [caller.answer() for caller in callers]
        close(net, leaves, (want[0], [2 * grad for grad in want[1]]))

    def test_padding(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        go(weft.batched(net, max_batch_size=ROWS, allowed_batch_sizes=[16], **FULL), xs)
        close(net, xs, want)

    def test_split_calls(self, scope, net):
        xs = inputs([7, 4, 9])
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=5, split=True, **FULL)
        go(policy, xs)
        close(net, xs, want)
        assert policy.statistics().backwards == 4

    def test_one_example_each(self, scope, net):
        xs = inputs([1] * 5)
        want = expected(net, xs)
        policy = weft.batched(net, rows=False, max_batch_size=5, **FULL)
        leaves = [x.detach()[0].requires_grad_() for x in xs]
        go(policy, leaves)
        close(net, leaves, (want[0], [grad[0] for grad in want[1]]))

    def test_several_inputs_and_outputs_in_a_tree(self, scope, net):
        def f(a, *, b):
            h = net(a)
            return {"h": h, "both": (h[:, :1] * b, torch.arange(len(a)), b.detach() * 2)}

        def back(tree, i):
            assert not tree["both"][1].requires_grad
            assert not tree["both"][2].requires_grad
            (loss(tree["h"], i) + tree["both"][0].sum()).backward()

        xs, bs = inputs(), [torch.rand(n, 1, dtype=torch.double, requires_grad=True) for n in SIZES]
        rows = [x.detach().clone().requires_grad_() for x in (*xs, *bs)]
        h = net(torch.cat(rows[:4]))
        both = h[:, :1] * torch.cat(rows[4:])
        (sum(loss(y, i) for i, y in enumerate(h.split(SIZES))) + both.sum()).backward()
        want = [p.grad.clone() for p in net.parameters()], [x.grad for x in rows]
        net.zero_grad()
        policy = weft.batched(f, max_batch_size=ROWS, **FULL)
        callers = together([lambda i=i: back(policy(xs[i], b=bs[i]), i) for i in range(4)])
        [caller.answer() for caller in callers]
        close(net, [*xs, *bs], want)

    def test_outputs_of_which_only_some_are_used(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(lambda x: (net(x), net(x) * 100), max_batch_size=ROWS, **FULL)
        go(policy, xs, lambda y, i: loss(y[0], i).backward())
        close(net, xs, want)

    def test_a_function_that_returns_its_input_or_a_view(self, scope):
        xs = inputs()
        policy = weft.batched(lambda x: (x, x[:, :1]), max_batch_size=ROWS, **FULL)
        go(policy, xs, lambda y, i: (y[0].sum() * (i + 1) + y[1].sum()).backward())
        for i, x in enumerate(xs):
            want = torch.full_like(x, i + 1.0)
            want[:, 0] += 1
            torch.testing.assert_close(x.grad, want)

    def test_batch_norm_in_training_mode(self, scope):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()
        state = {k: v.clone() for k, v in net.state_dict().items()}
        xs = inputs()
        want = expected(net, xs)
        after = {k: v.clone() for k, v in net.state_dict().items()}
        net.load_state_dict(state)
        order = []

        def f(x):
            order.append(x.detach())
            return net(x)

        go(weft.batched(f, max_batch_size=ROWS, **FULL), xs)
        close(net, xs, want)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, after[name])
        assert len(order) == 1

    def test_several_rounds_accumulate_and_step(self, scope, net):
        xs = inputs()
        twin = torch.nn.Sequential(
            *[type(m)(*([m.in_features, m.out_features] if hasattr(m, "in_features") else [])) for m in net]
        )
        twin = twin.double()
        twin.load_state_dict(net.state_dict())
        mine, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (net, twin))
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        for _ in range(3):
            go(policy, [x.detach() for x in xs])
            mine.step()
            mine.zero_grad()
            rows = torch.cat([x.detach() for x in xs])
            sum(loss(y, i) for i, y in enumerate(twin(rows).split(SIZES))).backward()
            theirs.step()
            theirs.zero_grad()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)

    def test_complex_and_half_precision(self, scope):
        for dtype in (torch.complex128, torch.bfloat16):
            w = torch.ones(2, dtype=dtype, requires_grad=True)
            policy = weft.batched(lambda x, w=w: x * w, max_batch_size=2, **FULL)
            xs = [torch.full((1, 2), i + 1.0, dtype=dtype) for i in range(2)]
            go(policy, xs, lambda y, i: y.real.sum().backward())
            assert w.grad.real.tolist() == [3, 3]


class TestNotWaiting:
    """wait_backward=False: gradients are handed in, and join settles."""

    @pytest.mark.parametrize("computed", [False, True])
    def test_the_last_one_runs_it(self, scope, net, computed):
        leaves = inputs()
        scale = 2 if computed else 1
        want = expected(net, [x * scale for x in leaves])
        policy = weft.batched(net, max_batch_size=ROWS, wait_backward=False, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x * 2 if computed else x) for x in leaves])]
        for i, y in enumerate(ys):
            loss(y, i).backward()
            assert (net[0].weight.grad is None) == (i < 3)
        policy.join()
        close(net, leaves, (want[0], [scale * grad for grad in want[1]]))

    def test_join_waits_for_the_rest(self, scope, net):
        xs = inputs([1, 1])
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=2, wait_backward=False, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in xs])]
        loss(ys[0], 0).backward()
        joining = start(policy.join)
        until(lambda: any(joint.watches for joint in policy._outstanding.joints))
        assert joining.is_alive()
        loss(ys[1], 1).backward()
        joining.answer()
        close(net, xs, want)
        policy.join()

    def test_join_from_a_task(self, scope, net):
        async def main():
            ys = await asyncio.gather(*(policy.aio(x) for x in xs))
            for i, y in enumerate(ys):
                loss(y, i).backward()
            await policy.aio.join()

        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, wait_backward=False, **FULL)
        asyncio.run(main())
        close(net, xs, want)

    @pytest.mark.usefixtures("little_garbage")
    def test_join_does_not_wait_for_what_was_dropped(self, scope, net):
        xs = inputs([1, 1])
        policy = weft.batched(net, max_batch_size=2, wait_backward=False, on_missing_gradient="zero", **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in xs])]
        loss(ys.pop(), 0).backward()
        joining = start(policy.join)
        ys.clear()
        gc.collect()
        joining.answer()
        assert xs[0].grad is None or xs[1].grad is None or (xs[0].grad == 0).all() or (xs[1].grad == 0).all()
        assert policy.statistics().backwards == 1

    def test_an_error_in_the_one_backward_is_raised_by_the_last_and_by_join(self, scope):
        policy = weft.batched(Broken.apply, max_batch_size=2, wait_backward=False, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in inputs([1, 1])])]
        ys[0].sum().backward()
        with pytest.raises(ZeroDivisionError, match="in the backward"):
            ys[1].sum().backward()
        with pytest.raises(ZeroDivisionError, match="in the backward"):
            policy.join()
        policy.join()  # told once


class Broken(torch.autograd.Function):
    """Twice, and an error in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in the backward")


class TestWhoWaits:
    def test_one_backward_that_covers_several_callers(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in xs])]
        start(sum(loss(y, i) for i, y in enumerate(ys)).backward).answer()
        close(net, xs, want)

    def test_that_covers_some_of_them(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in xs])]
        callers = [
            start((loss(ys[0], 0) + loss(ys[1], 1)).backward),
            start((loss(ys[2], 2) + loss(ys[3], 3)).backward),
        ]
        [caller.answer() for caller in callers]
        close(net, xs, want)

    def test_with_computed_inputs_it_is_refused_and_says_what_to_do(self, scope, net):
        policy = weft.batched(net, max_batch_size=2, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x * 2) for x in inputs([1, 1])])]
        with pytest.raises(FailedPreconditionError, match="wait_backward=False"):
            (ys[0].sum() + ys[1].sum()).backward()

    def test_tasks_of_one_event_loop(self, scope, net):
        async def work(i):
            loss(await policy.aio(xs[i]), i).backward()

        async def main():
            await asyncio.gather(*(work(i) for i in range(4)))

        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
        close(net, xs, want)

    def test_tasks_whose_inputs_were_computed(self, scope, net):
        async def work(i):
            loss(await policy.aio(leaves[i] * 2), i).backward()

        async def main():
            await asyncio.gather(*(work(i) for i in range(4)))

        leaves = inputs()
        want = expected(net, [x * 2 for x in leaves])
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
        close(net, leaves, (want[0], [2 * grad for grad in want[1]]))

    def test_tasks_and_threads_in_one_batch(self, scope, net):
        async def work(i):
            loss(await policy.aio(xs[i]), i).backward()

        async def main():
            threads = [asyncio.to_thread(lambda i=i: loss(policy(xs[i]), i).backward()) for i in (2, 3)]
            await asyncio.gather(work(0), work(1), *threads)

        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
        close(net, xs, want)

    def test_a_thread_with_two_calls_in_one_loss(self, scope, net):
        xs = inputs([2, 3, 2, 3])
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=4, fill="full", max_wait=0.2)

        def work(a, b):
            (loss(policy(xs[a]), a) + loss(policy(xs[b]), b)).backward()

        for caller in [start(work, 0, 1), start(work, 2, 3)]:
            caller.answer()
        close(net, xs, want)

    def test_inside_itself(self, scope):
        w = torch.tensor([2.0], requires_grad=True)

        def f(x):
            return policy(x[:, :1]) * w if x.shape[1] > 1 else x * w

        policy = weft.batched(f, max_batch_size=2, **FULL)
        xs = [torch.full((1, 2), i + 1.0) for i in range(2)]
        go(policy, xs, lambda y, i: y.sum().backward())
        assert w.grad.item() == 4 * 3


class TestRefused:
    def test_create_graph(self, scope, net):
        y = weft.batched(net)(inputs([2])[0])
        with pytest.raises(FailedPreconditionError, match="not differentiated twice"):
            y.sum().backward(create_graph=True)

    def test_a_second_backward(self, scope, net):
        y = weft.batched(net)(inputs([2])[0])
        y.sum().backward(retain_graph=True)
        before = net[0].weight.grad.clone()
        with pytest.raises(FailedPreconditionError, match="handed in already"):
            y.sum().backward()
        torch.testing.assert_close(net[0].weight.grad, before)

    def test_the_gradient_of_parameters_alone_finds_no_path(self, scope, net):
        y = weft.batched(net)(inputs([2], grad=False)[0])
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(y.sum(), list(net.parameters()))

    def test_the_gradient_of_the_input_is_there(self, scope, net):
        xs = inputs([2])
        want = expected(net, xs)
        (grad,) = torch.autograd.grad(loss(weft.batched(net)(xs[0]), 0), xs)
        torch.testing.assert_close(grad, want[1][0])


class TestMissing:
    def test_a_result_that_is_dropped_is_told_to_those_who_wait(self, scope, net):
        xs = inputs([1, 1])
        policy = weft.batched(net, max_batch_size=2, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in xs])]
        caller = start(lambda y: loss(y, 0).backward(), ys.pop())
        until(lambda: policy._outstanding.joints)
        ys.clear()
        with pytest.raises(
            FailedPreconditionError, match="1 of the 2 calls of the batch were dropped without a backward"
        ):
            caller.answer()

    def test_one_dropped_before(self, scope, net):
        policy = weft.batched(net, max_batch_size=2, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in inputs([1, 1])])]
        ys.pop()
        with pytest.raises(FailedPreconditionError, match="dropped"):
            loss(ys[0], 0).backward()
        assert not policy._outstanding.joints

    @pytest.mark.parametrize("early", [True, False])
    def test_zero_for_it(self, scope, net, early):
        xs = inputs([1, 2])
        policy = weft.batched(net, max_batch_size=3, on_missing_gradient="zero", **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in xs])]
        want = expected(net, xs[1:])
        if early:
            del ys[0]
            (ys[0] * 1).square().sum().backward()
        else:
            caller = start(lambda y: y.square().sum().backward(), ys[1])
            until(lambda: policy._outstanding.joints)
            del ys[0]
            caller.answer()
        for p, grad in zip(net.parameters(), want[0], strict=True):
            torch.testing.assert_close(p.grad, grad)
        torch.testing.assert_close(xs[1].grad, want[1][0])
        assert xs[0].grad is None

    @pytest.mark.usefixtures("little_garbage")
    def test_no_graph_is_kept_when_all_forget(self, scope):
        w = torch.ones(1, requires_grad=True)
        kept = []

        def f(x):
            y = x * w
            kept.append(weakref.ref(y))
            return y

        policy = weft.batched(f, max_batch_size=2, **FULL)
        gc.collect()
        gc.disable()
        try:
            ys = [c.answer() for c in together([lambda: policy(torch.ones(1, 1))] * 2)]
            assert kept[0]() is not None
            ys.clear()
            until(lambda: kept[0]() is None)
        finally:
            gc.enable()
        assert policy.statistics().backwards == 0

    @pytest.mark.parametrize("missing", ["error", "zero"])
    def test_the_deadline(self, clock, net, missing):
        xs = inputs([1, 2])
        want = expected(net, xs[1:])
        policy = weft.batched(
            net, max_batch_size=3, fill="full", max_wait=1, gradient_deadline=5.0, on_missing_gradient=missing
        )
        callers = [start_on(clock, policy, x) for x in xs]
        ys = [caller.answer() for caller in callers]
        clock.advance(2)
        waiting = start_on(clock, ys[1].square().sum().backward)
        clock.advance(2.999)
        assert waiting.is_alive()
        clock.advance(0.002)
        if missing == "error":
            with pytest.raises(
                DeadlineExceededError, match=r"gradients of 1 of the 2 calls of the batch did not come within 5 s"
            ):
                waiting.answer()
            with pytest.raises(DeadlineExceededError):
                ys[0].sum().backward()
            assert net[0].weight.grad is None
        else:
            waiting.answer()
            torch.testing.assert_close(net[0].weight.grad, want[0][0])
            with pytest.raises(FailedPreconditionError, match=r"gone back without it|handed in already"):
                ys[0].sum().backward()

    @pytest.mark.parametrize("settled_by", ["call", "join", "close"])
    def test_one_that_is_overdue_is_settled_by_whoever_comes(self, clock, net, settled_by):
        xs = inputs([1, 1])
        policy = weft.batched(
            net,
            max_batch_size=2,
            max_wait=1,
            fill="full",
            wait_backward=False,
            gradient_deadline=5.0,
            on_missing_gradient="zero",
        )
        ys = [caller.answer() for caller in [start_on(clock, policy, x) for x in xs]]
        start_on(clock, loss(ys[0], 0).backward).answer()
        clock.advance(6)
        assert net[0].weight.grad is None
        if settled_by == "call":
            last = start_on(clock, policy, xs[0].detach())
            clock.run_out()
            last.answer()
        else:
            start_on(clock, getattr(policy, settled_by)).answer()
        assert net[0].weight.grad is not None

    def test_a_caller_that_left_before_it_had_its_rows_is_not_missing(self, clock, net):
        xs = inputs([1, 2, 3])
        want = expected(net, xs[:1] + xs[2:])

        def f(x):
            clock.sleep(2.0)
            return net(x)

        policy = weft.batched(f, max_batch_size=6, max_wait=10, fill="full")
        callers = [start_on(clock, lambda i=i: policy.call(xs[i], deadline=[9, 1, 9][i])) for i in range(3)]
        clock.advance(1)
        assert isinstance(callers[1].end().error, DeadlineExceededError)
        clock.advance(1)
        ys = [callers[i].answer() for i in (0, 2)]
        callers = [start_on(clock, lambda i=i: (ys[i] * (i + 1)).square().sum().backward()) for i in range(2)]
        [caller.answer() for caller in callers]
        torch.testing.assert_close(net[0].weight.grad, want[0][0])


class TestErrors:
    def test_reach_everyone_each_its_own(self, scope):
        policy = weft.batched(Broken.apply, max_batch_size=3, **FULL)
        callers = together([lambda x=x: policy(x).sum().backward() for x in inputs([1, 1, 1])])
        assert [type(c.error) for c in callers] == [ZeroDivisionError] * 3
        assert len({id(c.error) for c in callers}) == 3
        policy.join()  # all of them were told

    def test_a_caller_that_goes_without_a_loss(self, scope, net):
        xs = inputs([1, 1])
        policy = weft.batched(net, max_batch_size=2, on_missing_gradient="zero", **FULL)

        def work(x, i):
            y = policy(x)
            if i:
                return "no loss"
            return loss(y, i).backward()

        callers = together([lambda x=x, i=i: work(x, i) for i, x in enumerate(xs)])
        assert [c.answer() for c in callers] == [None, "no loss"]
        assert policy.statistics().backwards == 1


class TestRecompute:
    def test_exact_with_dropout(self, scope):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)).double()
        xs = inputs([2, 2])
        order = []

        def f(x):
            if not order:
                order.append(x.detach().clone())
            return net(x)

        torch.manual_seed(7)
        policy = weft.batched(f, max_batch_size=4, recompute=True, **FULL)
        go(policy, [x.detach() for x in xs], lambda y, i: y.square().sum().backward())
        got = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        torch.manual_seed(7)
        net(order[0]).square().sum().backward()
        for grad, p in zip(got, net.parameters(), strict=True):
            torch.testing.assert_close(grad, p.grad)

    @pytest.mark.usefixtures("little_garbage")
    def test_activations_are_dropped(self, scope):
        w = torch.ones(4, 4, requires_grad=True)
        alive, runs = [], []

        def f(x):
            runs.append(len(x))
            h = torch.tanh(x @ w)
            alive.append(weakref.ref(h))
            return torch.tanh(h)

        for recompute in (False, True):
            policy = weft.batched(f, recompute=recompute)
            y = policy(torch.ones(2, 4))
            gc.collect()
            y.sum().backward()
        assert runs == [2, 2, 2]

        kept = []
        for recompute in (False, True):
            policy = weft.batched(lambda x: torch.tanh(torch.tanh(x @ w)), recompute=recompute, max_batch_size=100)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
                policy(torch.ones(100, 4))
            kept.append(None)
        without, with_ = kept[: kept.index(None)], kept[kept.index(None) + 1 : -1]
        assert sum(with_) < sum(without)


class TestModes:
    def test_no_grad_records_nothing(self, scope, net):
        policy = weft.batched(net)
        with torch.no_grad():
            assert not policy(inputs([1])[0]).requires_grad
        assert policy(inputs([1])[0]).requires_grad

    def test_modes_do_not_meet(self, scope, net):
        policy = weft.batched(net, max_batch_size=2, fill="full", max_wait=0.05)

        def without(x):
            with torch.no_grad():
                return policy(x)

        callers = together([lambda: policy(inputs([1])[0]), lambda: without(inputs([1])[0])])
        assert [c.answer().requires_grad for c in callers] == [True, False]
        assert policy.statistics().sizes == {1: 2}

    def test_autocast(self, scope, net):
        net = net.float()
        xs = [x.detach().float() for x in inputs()]

        def work(x, i):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = policy(x)
            assert y.dtype == torch.bfloat16
            loss(y.float(), i).backward()

        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        callers = together([lambda x=x, i=i: work(x, i) for i, x in enumerate(xs)])
        [caller.answer() for caller in callers]
        assert policy.statistics().sizes == {ROWS: 1}
        assert net[0].weight.grad.dtype == torch.float32

    def test_those_whose_input_needs_a_gradient_do_not_meet_the_others(self, scope, net):
        policy = weft.batched(net, max_batch_size=2, fill="full", max_wait=0.05)
        xs = [inputs([1])[0], inputs([1], grad=False)[0]]
        go(policy, xs)
        assert xs[0].grad is not None
        assert policy.statistics().sizes == {1: 2}


def test_many_callers_round_after_round(scope, net):
    """16 threads, batches as they come: the sum of all losses over all rounds."""
    xs = [[x.detach() for x in inputs([i % 3 + 1] * 10)] for i in range(16)]
    want = expected(net, [x for mine in xs for x in mine], None)
    net.zero_grad()
    for i, mine in enumerate(xs):
        for x in mine:
            (net(x) * (i + 1)).square().sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    policy = weft.batched(net, max_batch_size=16)
    lock = threading.Lock()

    def work(i):
        for x in xs[i]:
            y = policy(x)
            (y * (i + 1)).square().sum().backward()
        with lock:
            return True

    callers = together([lambda i=i: work(i) for i in range(16)])
    assert all(c.answer() for c in callers)
    for p, grad in zip(net.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)
    assert not policy._outstanding.joints
