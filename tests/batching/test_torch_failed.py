"""A backward that fails in one batch: what the callers of its other batches are told, and what it leaves behind."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from support.batched_losses import close, expected, inputs, loss, two_layers
from support.callers import start, start_on, together, until

import weft
from weft.batching import gradient
from weft.batching.gradient import ResultHandle, SharedBackward, this_thread
from weft.core.clock import MonotonicClock
from weft.errors import CancelledError, DeadlineExceededError, FailedPreconditionError

torch = pytest.importorskip("torch")

CARTPOLE = Path(__file__).parents[1] / "support" / "cartpole.py"


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


@pytest.fixture
def net():
    return two_layers()


def pair(f, **options):
    """A batcher of two calls to a batch, whose gradients have 60 s."""
    return weft.batched(f, **{"max_batch_size": 2, "max_wait": 60.0, "gradient_deadline": 60.0, **options})


def row():
    return torch.ones(1, 4, dtype=torch.double)


class Broken(torch.autograd.Function):
    """Twice, and an error in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in the backward")


class TestWhatOthersAreTold:
    """`first` is shared by A and B, `second` by A and C; the loss of A covers both, and fails in `second`."""

    def test_gradients_that_did_not_come_in_time(self, clock, net):
        first, second = pair(net), pair(net, gradient_deadline=5.0)
        kept = []
        a = start_on(clock, lambda: (first(row()) + second(row())).sum().backward())
        b = start_on(clock, lambda: first(row()).sum().backward())
        start_on(clock, lambda: kept.append(second(row()))).answer()
        clock.advance(5.1)
        with pytest.raises(
            DeadlineExceededError, match=r"^the gradients of 1 of the 2 calls .* within 5 s of the first one: "
        ):
            a.answer()
        told = b.end().error
        assert type(told) is DeadlineExceededError
        assert str(told).startswith(
            "the gradients of 1 of the 2 calls of the batch did not come: their callers' own backward()"
        )
        assert "The first error was DeadlineExceededError: the gradients of 1 of the 2 calls" in str(told)
        assert "dropped" not in str(told)

    def test_where_others_take_the_calls_of_a_back(self, clock, net):
        """The thread whose backward fails made none of the calls."""
        first, second = pair(net), pair(net, gradient_deadline=5.0)
        calls = [start_on(clock, f, row()) for f in (first, first, second, second)]
        ys = [call.answer() for call in calls]
        b = start_on(clock, ys[1].sum().backward)
        loss = ys[0].sum() + ys[2].sum()
        del calls, ys[0], ys[1]
        a = start_on(clock, loss.backward)
        del loss
        clock.advance(5.1)
        assert isinstance(a.end().error, DeadlineExceededError)
        a.error = a.call = None
        clock.settle()
        told = b.end().error
        assert type(told) is DeadlineExceededError
        assert "own backward() raised before it reached them" in str(told)

    def test_what_failed_first_is_told_on_and_on(self, clock, net):
        """A fails in the last batch, so B does in the third, so C in the second, so D in the first."""
        batches = [pair(net), pair(net), pair(net), pair(net, gradient_deadline=5.0)]
        kept = []

        def chained(earlier, later):
            return lambda: (batches[earlier](row()) + batches[later](row())).sum().backward()

        callers = [
            start_on(clock, lambda: batches[0](row()).sum().backward()),
            *(start_on(clock, chained(i, i + 1)) for i in range(3)),
        ]
        start_on(clock, lambda: kept.append(batches[3](row()))).answer()
        clock.advance(5.1)
        told = [str(caller.end().error) for caller in callers]
        assert [type(caller.error) for caller in callers] == [DeadlineExceededError] * 4
        assert [text.count("The first error was") for text in told] == [1, 1, 1, 0]
        assert all("did not come within 5 s" in text for text in told)
        assert not any("dropped" in text for text in told)

    def test_a_loss_for_each_call(self, clock, net):
        """The backwards after the one that failed are not called: that is no result dropped either."""
        first, second = pair(net), pair(net, gradient_deadline=5.0)
        kept = []

        def each():
            losses = [first(row()).sum(), second(row()).sum()]
            while losses:
                losses.pop().backward()

        a, b = start_on(clock, each), start_on(clock, lambda: first(row()).sum().backward())
        start_on(clock, lambda: kept.append(second(row()))).answer()
        clock.advance(5.1)
        assert isinstance(a.end().error, DeadlineExceededError)
        a.error = None
        clock.settle()
        assert "own backward() raised" in str(b.end().error)

    def test_an_error_of_the_function(self, scope, net):
        first, second = pair(net), pair(Broken.apply)
        a, b, c = together(
            [
                lambda: (first(row()).sum() + second(row().requires_grad_()).sum()).backward(),
                lambda: first(row()).sum().backward(),
                lambda: second(row().requires_grad_()).sum().backward(),
            ]
        )
        assert [type(caller.error) for caller in (a, b, c)] == [
            ZeroDivisionError,
            FailedPreconditionError,
            ZeroDivisionError,
        ]
        assert "The first error was ZeroDivisionError: in the backward" in str(b.error)

    @pytest.mark.parametrize("why", ["goes back once", "covers several calls"])
    def test_a_backward_that_is_refused(self, scope, net, why):
        first, second = pair(net), pair(net)

        def refused():
            y = first(row()).sum()
            if why == "covers several calls":
                y = y + sum(c.answer().sum() for c in together([lambda: second(row().requires_grad_() * 2)] * 2))
            with pytest.raises(FailedPreconditionError, match=why):
                y.backward(create_graph=why == "goes back once")

        a, b = together([refused, lambda: first(row()).sum().backward()])
        a.answer()
        assert type(b.error) is FailedPreconditionError
        assert "own backward() raised before it reached them" in str(b.error)
        assert why in str(b.error)

    def test_one_result_dropped_after_an_old_failure_is_dropped(self, scope, net):
        broken, policy = weft.batched(Broken.apply), pair(net)

        def drops():
            with pytest.raises(ZeroDivisionError):
                broken(row().requires_grad_()).sum().backward()
            policy(row())

        a, b = together([drops, lambda: policy(row()).sum().backward()])
        a.answer()
        with pytest.raises(
            FailedPreconditionError, match="1 of the 2 calls of the batch were dropped without a backward"
        ):
            b.answer()

    def test_of_a_failed_and_a_dropped_one_only_the_dropped_is_called_so(self, scope, net):
        policy, broken = pair(net, max_batch_size=3), weft.batched(Broken.apply)
        gone = threading.Barrier(3)

        def fails():
            y = policy(row()).sum() + broken(row().requires_grad_()).sum()
            with pytest.raises(ZeroDivisionError):
                y.backward()
            del y
            gone.wait(20)

        def drops():
            policy(row())
            gone.wait(20)

        def goes_back():
            y = policy(row())
            gone.wait(20)
            until(lambda: len(y.grad_fn.handle.ticket.backward.dropped) == 2)  # the batch's own thread may let go last
            y.sum().backward()

        callers = together([fails, drops, goes_back])
        assert "the results of 1 of the 3 calls" in str(callers[2].error)

    def test_numpy_pull_backs(self, clock):
        first, second = (
            pair(lambda x: x * 2, vjp=lambda x: (x * 2, lambda g: g * 2), gradient_deadline=seconds)
            for seconds in (60.0, 5.0)
        )
        x = row().numpy()
        kept = []

        def both():
            pulls = [first.vjp(x)[1], second.vjp(x)[1]]
            while pulls:
                pulls.pop()(x)

        a, b = start_on(clock, both), start_on(clock, lambda: first.vjp(x)[1](x))
        start_on(clock, lambda: kept.append(second.vjp(x))).answer()
        clock.advance(5.1)
        assert isinstance(a.end().error, DeadlineExceededError)
        a.error = None
        clock.settle()
        assert "own backward() raised" in str(b.end().error)
        assert type(b.error) is DeadlineExceededError


class Kept(torch.autograd.Function):
    """The same, with something that lives as long as the node."""

    @staticmethod
    def forward(ctx, x, thing):
        ctx.thing = thing
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Thing:
    pass


class TestWhatItLeaves:
    @pytest.mark.usefixtures("little_garbage")
    def test_no_node_stays_in_the_thread(self, scope, net):
        """Torch keeps the nodes behind one that raises until the thread has ended, and frees them when no Python runs in it."""
        broken, policy = weft.batched(Broken.apply), weft.batched(net)
        found, end = [], threading.Event()

        def work():
            thing = Thing()
            y = Kept.apply(policy(row()), thing).sum() + Kept.apply(row().requires_grad_(), thing).sum()
            y = y + broken(row().requires_grad_()).sum()  # the last node is the first to go back
            with pytest.raises(ZeroDivisionError):
                y.backward()
            found.append(weakref.ref(thing))
            del thing, y
            gc.collect()
            found.append(found[0]() is None)
            end.wait(20)

        caller = start(work)
        until(lambda: len(found) == 2 or not caller.is_alive())
        end.set()
        caller.answer()
        assert found[1]

    def test_an_error_of_the_function_says_where_it_was_raised(self, scope):
        with pytest.raises(ZeroDivisionError, match="in the backward") as caught:
            weft.batched(Broken.apply)(row().requires_grad_()).sum().backward()
        (note,) = caught.value.__notes__
        assert note.startswith("Raised by the batch's backward:\nTraceback")
        assert 'raise ZeroDivisionError("in the backward")' in note

    def test_leaves_are_left_alone_and_hooks_have_values(self, scope, net):
        broken = weft.batched(Broken.apply)
        leaf, other, seen = row().requires_grad_(), row().requires_grad_(), []
        computed = other * 2
        computed.register_hook(lambda grad: seen.append(grad.sum().item()))
        y = broken(leaf).sum() + broken(computed).sum()
        with pytest.raises(ZeroDivisionError):
            y.backward()
        assert leaf.grad is None
        assert seen == [0.0]

    def test_another_error_in_the_same_backward(self, scope):
        from weft.batching import torch as joint_torch

        broken = weft.batched(Broken.apply)
        y = broken(Broken.apply(row().requires_grad_())).sum()
        with pytest.raises(ZeroDivisionError):
            y.backward()
        del y
        gc.collect()
        assert not joint_torch._failed

    def test_a_node_that_is_called_by_hand(self, scope):
        y = weft.batched(Broken.apply)(row().requires_grad_())
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            y.grad_fn.apply(torch.ones_like(y))

    def test_a_refused_backward_can_be_called_again_as_it_should_be(self, scope, net):
        xs = inputs([2])
        want = expected(net, xs)
        y = loss(weft.batched(net)(xs[0]), 0)
        with pytest.raises(FailedPreconditionError, match="not differentiated twice"):
            y.backward(create_graph=True)
        y.backward()
        close(net, xs, want)

    @pytest.mark.parametrize("by", ["backward", "grad"])
    def test_the_error_is_the_first_one(self, scope, by):
        broken = weft.batched(Broken.apply)
        x = row().requires_grad_()
        y = broken(x).sum() + broken(x * 2).sum()
        with pytest.raises(ZeroDivisionError, match="in the backward"):
            y.backward() if by == "backward" else torch.autograd.grad(y, [x])


class TestEveryWaitEnds:
    def test_threads_that_end_between_the_call_and_the_backward(self, scope, net):
        policy = pair(net)
        a, b = together([lambda: policy(row()).shape, lambda: policy(row()).sum().backward()])
        a.answer()
        with pytest.raises(FailedPreconditionError, match="were dropped without a backward"):
            b.answer()

    @pytest.mark.parametrize("waits", [True, False])
    def test_threads_that_end_and_leave_their_result_to_others(self, clock, net, waits):
        policy, kept = pair(net, gradient_deadline=5.0, wait_backward=waits), []
        a = start_on(clock, lambda: kept.append(policy(row())))
        b = start_on(clock, lambda: policy(row()).sum().backward())
        a.answer()
        if not waits:
            b.answer()
            b = start_on(clock, policy.join)
        clock.advance(4.9)
        assert b.is_alive()
        clock.advance(0.2)
        with pytest.raises(DeadlineExceededError, match="did not come within 5 s"):
            b.answer()

    def test_join_of_several_batches_waits_for_the_longest_deadline_alone(self, clock, net):
        policy, kept = pair(net, gradient_deadline=5.0, wait_backward=False), []
        for _ in range(3):
            a, b = (
                start_on(clock, lambda: kept.append(policy(row()))),
                start_on(clock, lambda: policy(row()).sum().backward()),
            )
            a.answer(), b.answer()
            clock.advance(1.0)
        joining = start_on(clock, policy.join)
        clock.advance(3.9)
        assert joining.is_alive()
        clock.advance(0.2)
        with pytest.raises(DeadlineExceededError) as caught:
            joining.answer()
        assert caught.value.__notes__ == ["2 more backwards failed"]

    def test_a_changed_gradient_deadline_holds_for_waits_that_begin_after(self, clock):
        """Of the ops: `weft.batched` has its own."""

        def owner():
            x = row().numpy()
            return weft.raw_ops.UnbatchGrad(x, [[1, 0, 1], [2, 1, 2]], x, 1)

        with weft.gradient_deadline(5.0):
            before = start_on(clock, owner)
            weft.gradient_deadline(1000.0)
            clock.advance(5.1)
            with pytest.raises(DeadlineExceededError):
                before.answer()
        with weft.gradient_deadline(2.0):
            after = start_on(clock, owner)
        clock.advance(2.1)
        with pytest.raises(DeadlineExceededError):
            after.answer()

    def test_a_closed_account_rejects_those_who_wait_and_those_who_come(self, scope, net):
        policy = pair(net)
        ys = [c.answer() for c in together([lambda: policy(row())] * 2)]
        waiting = start(ys[0].sum().backward)
        until(lambda: policy._outstanding.backwards)
        later = policy._outstanding
        later.close(CancelledError("the interpreter is ending"))
        with pytest.raises(CancelledError, match="is ending"):
            waiting.answer()
        with pytest.raises(CancelledError, match="is ending"):
            ys[1].sum().backward()
        others = [c.answer() for c in together([lambda: policy(row())] * 2)]
        with pytest.raises(CancelledError, match="is ending"):
            others[0].sum().backward()
        assert not later.backwards


class Registry:
    """A registry that can be interrupted."""

    def __init__(self):
        self.backwards, self.interrupts = set(), 0

    def add(self, backward):
        self.backwards.add(backward)

    def remove(self, backward):
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.backwards.discard(backward)


def backward_of(registry, settle=lambda gradients: gradients, seconds=0.2):
    return SharedBackward([this_thread()] * 2, settle, MonotonicClock(), seconds, False, registry)


class TestInterrupted:
    """An exception of a signal handler may come between any two steps."""

    def test_between_the_last_gradient_and_the_run(self):
        registry = Registry()
        backward = backward_of(registry)
        first, last = backward.tickets
        assert [backward.add(ticket, i) for i, ticket in enumerate((first, last))] == [False, True]
        waiting = start(first.wait)
        assert (waiting.answer(), last.wait()) == (0, 1)
        assert not registry.backwards

    def test_of_a_backward_that_someone_watches(self):
        backward = backward_of(Registry(), seconds=60)
        for ticket in backward.tickets:
            backward.add(ticket, 1)
        assert start(backward.watch().wait).answer() is None
        assert backward.done

    @pytest.mark.parametrize("times", [1, 2])
    def test_while_the_outcome_is_told(self, times):
        registry = Registry()
        backward = backward_of(registry, seconds=60)
        watch = backward.watch()
        first, last = backward.tickets
        first.deposit("a")
        waiting = start(first.wait)
        until(lambda: first.waiter is not None)
        registry.interrupts = times
        with pytest.raises(KeyboardInterrupt):
            last.deposit("b")
        backward.check()  # as every call of the batcher and every alarm does
        assert waiting.answer() == "a"
        assert start(watch.wait).answer() is None
        assert not registry.backwards
        assert last.wait() == "b"

    def test_inside_the_backward(self):
        def settle(gradients):
            raise KeyboardInterrupt

        first, last = backward_of(Registry(), settle, seconds=60).tickets
        first.deposit("a")
        waiting = start(first.wait)
        with pytest.raises(KeyboardInterrupt):
            last.deposit("b")
        with pytest.raises(FailedPreconditionError, match="was ended by KeyboardInterrupt"):
            waiting.answer()

    def test_a_handle_that_was_never_made_whole(self):  # as torch.compile makes one, when it traces a call
        ResultHandle.__new__(ResultHandle).__del__()

    def test_an_outcome_keeps_no_gradients(self):
        tickets = backward_of(Registry()).tickets
        handles = [ResultHandle(ticket) for ticket in tickets]
        for ticket in tickets:
            ticket.deposit([Thing()])
        kept = [weakref.ref(ticket.wait()[0]) for ticket in tickets]
        for ticket in tickets:
            ticket.value = None
        assert [ref() for ref in kept] == [None, None]
        del handles


def test_a_finalizer_in_the_first_call_of_a_thread(monkeypatch):
    """It may drop a result, and asks for the thread in the middle of the same question."""
    asked = []

    class Interrupted(gradient.CallerThread):
        def __init__(self):
            if not asked:
                asked.append(None)
                asked.append(this_thread())
            super().__init__()

    monkeypatch.setattr(gradient, "CallerThread", Interrupted)
    start(lambda: asked.extend([this_thread(), this_thread()])).join()
    assert asked[1] is asked[2] is asked[3]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["0.1", "3"])
def test_whole_episodes_of_32_daemon_threads(seconds):
    """Ten times: every backward goes back or is told the truth, nothing aborts once the threads have ended."""
    for _ in range(10):
        command = [sys.executable, str(CARTPOLE), "weft", "joined", seconds]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
        told = json.loads(done.stdout)
        assert sum(told.values()) == 32
        for text in told:
            late = text.startswith("DeadlineExceededError: the gradients of N of the N calls") and "dropped" not in text
            assert text == "gone back" or late, told
