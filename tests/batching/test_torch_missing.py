"""Gradients that never come, and activations that are computed again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import numpy as np
import pytest
from support.batched_calls import FULL
from support.batched_losses import expected, go, inputs, loss, two_layers
from support.callers import start, start_on, together, until

import weft
from weft.errors import DeadlineExceededError, FailedPreconditionError

torch = pytest.importorskip("torch")


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


@pytest.fixture
def net():
    return two_layers()


class TestMissing:
    def test_a_result_that_is_dropped_is_told_to_those_who_wait(self, scope, net):
        xs = inputs([1, 1])
        policy = weft.batched(net, max_batch_size=2, **FULL)
        ys = [c.answer() for c in together([lambda x=x: policy(x) for x in xs])]
        caller = start(lambda y: loss(y, 0).backward(), ys.pop())
        until(lambda: policy._outstanding.backwards)
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
        assert not policy._outstanding.backwards

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
            until(lambda: policy._outstanding.backwards)
            del ys[0]
            caller.answer()
        for p, grad in zip(net.parameters(), want[0], strict=True):
            torch.testing.assert_close(p.grad, grad)
        torch.testing.assert_close(xs[1].grad, want[1][0])
        assert xs[0].grad is None

    def test_a_caller_in_inference_mode_finds_the_batch_overdue(self, clock, net):
        """It runs the backward, in the mode of backwards: gradients made in its own mode could not be added to."""
        xs = inputs([1, 1])
        policy = weft.batched(
            net, max_batch_size=2, wait_backward=False, on_missing_gradient="zero", gradient_deadline=1.0, **FULL
        )
        callers = [start_on(clock, policy, x) for x in xs]
        ys = [caller.answer() for caller in callers]
        loss(ys[0], 0).backward()
        clock.advance(2.0)
        with torch.inference_mode():
            policy._outstanding.end_overdue()  # as every call does
        assert policy.statistics().backwards == 1
        assert not any(p.grad.is_inference() for p in net.parameters())
        assert not xs[0].grad.is_inference()

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
        policy = weft.batched(net, max_batch_size=3, max_wait=1, gradient_deadline=5.0, on_missing_gradient=missing)
        callers = [start_on(clock, policy, x) for x in xs]
        ys = [caller.answer() for caller in callers]
        clock.advance(600)  # it counts from the first gradient
        waiting = start_on(clock, ys[1].square().sum().backward)
        clock.advance(4.999)
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
            with pytest.raises(FailedPreconditionError, match="gone back without it"):
                ys[0].sum().backward()

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_long_rollout_before_everybody_goes_back(self, clock, net, waits):
        xs = inputs([1, 2, 3])
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=6, max_wait=1, gradient_deadline=5.0, wait_backward=waits)
        ys = [caller.answer() for caller in [start_on(clock, policy, x) for x in xs]]
        clock.advance(600)
        callers = []
        for i, y in enumerate(ys):
            callers.append(start_on(clock, loss(y, i).backward))
            clock.advance(2.4)
        [caller.answer() for caller in callers]
        policy.join()
        torch.testing.assert_close(net[0].weight.grad, want[0][0])

    def test_one_that_comes_while_the_batch_goes_back_without_it(self, clock):
        """Its gradient would be lost: it is told so, and nobody else."""
        late = []

        class Held(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                with pytest.raises(FailedPreconditionError, match="gone back without it"):
                    late.pop().backward()
                return gradient * 2

        policy = weft.batched(
            Held.apply, max_batch_size=2, max_wait=1, gradient_deadline=5.0, on_missing_gradient="zero"
        )
        x = torch.ones(1, 1, requires_grad=True)
        callers = [start_on(clock, policy, x) for _ in range(2)]
        first, second = (caller.answer() for caller in callers)
        late.append(second.sum())
        waiting = start_on(clock, first.sum().backward)
        clock.advance(6)
        waiting.answer()
        assert (late, x.grad.item()) == ([], 2)

    @pytest.mark.parametrize("settled_by", ["call", "join", "close"])
    def test_one_that_is_overdue_is_settled_by_whoever_comes(self, clock, net, settled_by):
        xs = inputs([1, 1])
        policy = weft.batched(
            net,
            max_batch_size=2,
            max_wait=1,
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

        policy = weft.batched(f, max_batch_size=6, max_wait=10.0)
        callers = [start_on(clock, lambda i=i: policy.call(xs[i], deadline=[9, 1, 9][i])) for i in range(3)]
        clock.advance(1)
        assert isinstance(callers[1].end().error, DeadlineExceededError)
        clock.advance(1)
        ys = [callers[i].answer() for i in (0, 2)]
        callers = [start_on(clock, lambda i=i: (ys[i] * (i + 1)).square().sum().backward()) for i in range(2)]
        [caller.answer() for caller in callers]
        torch.testing.assert_close(net[0].weight.grad, want[0][0])


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
        w = torch.ones(4, requires_grad=True)
        alive, runs = [], []

        def f(x):
            runs.append(len(x))
            activation = np.ones((len(x), 4), np.float32)
            alive.append(weakref.ref(activation))
            return torch.from_numpy(activation) * w  # keeps it for the gradient of `w`

        for recompute in (False, True):
            policy = weft.batched(f, recompute=recompute)
            y = policy(torch.ones(2, 4))
            gc.collect()
            assert (alive[-1]() is None) == recompute
            y.sum().backward()
        assert runs == [2, 2, 2]


def objects_below(x, depth=4):
    """The ids of what the garbage collector finds below an object."""
    found, level = set(), [x]
    for _ in range(depth):
        level = [each for each in gc.get_referents(*level) if id(each) not in found and not isinstance(each, type)]
        found |= set(map(id, level))
    return found


class TestCollector:
    """The garbage collector must find a caller's node from its result, whoever else uses the node meanwhile."""

    @pytest.fixture
    def y(self, scope):
        return weft.batched(lambda x: x * 2)(torch.ones(1, 2, requires_grad=True))

    def test_it_finds_the_node_of_a_result_in_use(self, y):
        z = y * 2  # owns the node, too
        assert id(y.grad_fn) in objects_below(y)
        z.sum().backward()

    def test_it_finds_the_nodes_of_all_results(self, scope):
        for y in weft.batched(lambda x: (x * 2, {"a": x + 1}))(torch.ones(1, 2, requires_grad=True)):
            y = y["a"] if isinstance(y, dict) else y
            assert id(y.grad_fn) in objects_below(y)

    def test_a_result_in_a_cycle_is_freed(self, scope):
        y = weft.batched(lambda x: x * 2)(torch.ones(1, 2, requires_grad=True))

        class Holder:
            pass

        holder = Holder()
        holder.y, y.holder = y, holder
        gone = weakref.ref(y.grad_fn), weakref.ref(holder)
        del y, holder
        gc.collect()
        assert [each() for each in gone] == [None, None]

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_a_result_is_saved_and_loaded(self, y, weights_only):
        file = io.BytesIO()
        torch.save({"y": y}, file)
        file.seek(0)
        assert torch.load(file, weights_only=weights_only)["y"].tolist() == [[2, 2]]

    def test_a_result_is_pickled_and_copied(self, y):
        assert pickle.loads(pickle.dumps(y)).tolist() == [[2, 2]]
        assert copy.copy(y).tolist() == [[2, 2]]
        assert copy.deepcopy(y.detach()).tolist() == [[2, 2]]

    @pytest.mark.slow
    def test_a_result_that_another_thread_begins_to_use_during_a_collection(self, scope):
        f = weft.batched(lambda x: x * 2)
        gc.disable()
        try:
            for size in range(20_000_000, 120_000_000, 10_000_000):
                y = f(torch.ones(1, requires_grad=True))
                other = torch.ones(size)
                gc.collect()
                many = [[i] for i in range(4_000_000)]  # so that the collection takes as long as the operation
                found, begins = [], threading.Event()

                def use(y=y, other=other, found=found, begins=begins):
                    begins.set()
                    found.append(y.float_power(other))  # converts `other`, then records the use of `y`

                thread = threading.Thread(target=use)
                thread.start()
                begins.wait()
                gc.collect()
                thread.join()
                found[0].sum().backward()
                del y, many
        finally:
            gc.enable()
