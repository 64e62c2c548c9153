"""Who waits in a backward for whom, what is refused, and who is told of an error: no wait that cannot end."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from support.batched_calls import FULL
from support.batched_losses import ROWS, close, expected, go, inputs, loss, two_layers
from support.callers import PATIENCE, start, together, until

import weft
from weft.errors import FailedPreconditionError

torch = pytest.importorskip("torch")


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


@pytest.fixture
def net():
    return two_layers()


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
        until(lambda: any(backward.watches for backward in policy._outstanding.backwards))
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

    def test_a_task_does_not_wait_for_a_thread(self, scope, net):
        """A task that waited would stop its event loop, on which the thread may wait."""

        async def main():
            thread = start(lambda: (policy(xs[0]), may_go_back.wait(PATIENCE)))
            y = await policy.aio(xs[1])
            loss(y, 1).backward()
            may_go_back.set()
            loss(thread.answer()[0], 0).backward()
            await policy.aio.join()

        xs, may_go_back = inputs([1, 1]), threading.Event()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=2, gradient_deadline=10.0, **FULL)
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
        close(net, xs, want)

    def test_a_thread_with_two_calls_in_one_loss(self, scope, net):
        xs = inputs([2, 3, 2, 3])
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=4, max_wait=0.2)

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
