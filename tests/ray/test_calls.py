"""Remote calls and gradients, with replicas in threads of this process."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.libraries import need

need("msgspec")
need("optree")

from support.ray_local import local  # noqa: E402

import weft  # noqa: E402
from weft import errors  # noqa: E402
from weft.ray import frames  # noqa: E402


def tanh_with_pull_back(x):
    y = np.tanh(x)
    return y, lambda dy: dy * (1 - y * y)


def nested(x):
    return {"a": 2 * x, "b": (3 * x, "text")}


def nested_with_pull_back(x):
    return nested(x), lambda g: 2 * g["a"] + 3 * g["b"][0]


def doubled(tokens):
    return tokens.with_values(tokens.flat_values * 2)


def make_double():
    def double(x, *, factor=2.0, more=None):
        if np.any(x < 0):
            raise ValueError("negative")
        return {"y": x * factor, "more": more, "rows": [str(v) for v in x[:, 0]]} if more else x * factor

    return double


def test_calls_of_threads_share_batches():
    with local(make_double, max_wait=5.0, max_batch_size=8) as deployment:
        policy = deployment.handle
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda i: policy(np.full((1, 2), float(i))), range(8)))
        for i, y in enumerate(found):
            np.testing.assert_array_equal(y, np.full((1, 2), 2.0 * i))
        assert policy.statistics().batches == 1
        y, receipt = policy.call(np.ones((8, 1)), receipt=True, deadline=10.0)
        assert (receipt.size, receipt.position, receipt.version) == (8, 0, 0)


def test_options_of_calls_and_nested_results():
    with local(make_double) as deployment:
        policy = deployment.handle
        found = policy(np.ones((2, 1)), factor=3.0, more=("a", 1))
        assert found["more"] == ("a", 1)
        assert found["rows"] == ["1.0", "1.0"]
        np.testing.assert_array_equal(found["y"], [[3.0], [3.0]])
        with weft.priority("low"):
            np.testing.assert_array_equal(policy(np.ones((1, 1))), [[2.0]])
        with pytest.raises(errors.InvalidArgumentError, match="priority"):
            policy.call(np.ones((1, 1)), priority="middle")
        with pytest.raises(ValueError, match="negative"):
            policy(-np.ones((1, 1)))
        with pytest.raises(errors.InvalidArgumentError):
            policy(np.ones((65, 1)))
        with pytest.raises(errors.InvalidArgumentError, match="object"):
            policy(np.ones((1, 1)), more=object())


def test_every_call_is_answered(monkeypatch):
    """A result that is too long, and errors whose text cannot travel as it is."""

    class Unprintable(Exception):
        def __str__(self):
            raise ValueError

    def make():
        def model(x, *, what):
            if what == "long":
                return [("text" * 1000) for _ in x]
            raise {"bytes": OSError("no file \udcff"), "class": Unprintable(), "huge": ValueError("x" * 100000)}[what]

        return model

    with local(make) as deployment:
        policy = deployment.handle
        monkeypatch.setattr(frames, "MOST_MESSAGE", 3000)
        with pytest.raises(errors.InvalidArgumentError, match="at most 3000 bytes"):
            policy.call(np.ones((1, 1)), what="long", deadline=20.0)
        monkeypatch.undo()
        with pytest.raises(OSError, match=r"no file \\udcff"):
            policy.call(np.ones((1, 1)), what="bytes", deadline=20.0)
        with pytest.raises(errors.UnknownError, match="Unprintable: its text cannot be made"):
            policy.call(np.ones((1, 1)), what="class", deadline=20.0)
        with pytest.raises(ValueError, match=r"^x{65536}$"):
            policy.call(np.ones((1, 1)), what="huge", deadline=20.0)


def test_tasks_of_an_event_loop():
    with local(make_double, replicas=2) as deployment:
        policy = pickle.loads(pickle.dumps(deployment.handle))

        async def main():
            found = await asyncio.gather(*[policy.aio(np.full((1, 1), float(i))) for i in range(64)])
            assert [float(y[0, 0]) for y in found] == [2.0 * i for i in range(64)]
            _, receipt = await policy.aio.call(np.ones((1, 1)), receipt=True)
            assert receipt.size >= 1
            with pytest.raises(ValueError, match="negative"):
                await policy.aio(-np.ones((1, 1)))
            leaving = asyncio.ensure_future(policy.aio(np.ones((1, 1))))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving

        asyncio.run(main())
        asyncio.run(main())  # another loop has links of its own
        assert sum(each.calls for each in policy.statistics(per_replica=True)) >= 132


def test_pull_backs():
    with local(lambda: np.tanh, vjp=tanh_with_pull_back) as deployment:
        policy = deployment.handle
        x = np.linspace(0, 1, 3).reshape(3, 1)
        y, pull_back = policy.vjp(x)
        np.testing.assert_allclose(pull_back(np.ones_like(y)), 1 - np.tanh(x) ** 2)

        async def main():
            y, pull_back = await policy.aio.vjp(x)
            np.testing.assert_allclose(await pull_back(np.ones_like(y)), 1 - np.tanh(x) ** 2)

        asyncio.run(main())
    for given in ({"a": x, "b": (x, None)}, (x, x)):  # all leaves of the result, or its arrays
        with local(lambda: nested, vjp=nested_with_pull_back) as deployment:
            _, pull_back = deployment.handle.vjp(x)
            np.testing.assert_allclose(pull_back(given), 5 * x)
    tokens = weft.RaggedTensor.from_rows([[1.0, 2.0], [3.0]])
    with local(lambda: doubled, ragged=["tokens"], vjp=lambda tokens: (doubled(tokens), doubled)) as deployment:
        y, pull_back = deployment.handle.vjp(tokens)
        assert pull_back(y).to_list() == [[4.0, 8.0], [12.0]]
    with local(lambda: np.tanh) as deployment, pytest.raises(errors.FailedPreconditionError, match="vjp="):
        deployment.handle.vjp(np.ones((1, 1)))


def test_a_replica_that_is_gone():
    with local(make_double, replicas=2) as deployment:
        policy = deployment.handle
        policy(np.ones((1, 1)))
        deployment.kill(0)
        for _ in range(20):  # lost calls are sent again
            np.testing.assert_array_equal(policy(np.ones((1, 1))), [[2.0]])
        deployment.start(0)
        until = time.monotonic() + 20
        while not deployment.replicas[0].batcher.statistics().calls:
            policy(np.ones((1, 1)))
            assert time.monotonic() < until
        assert deployment.keeper.deaths == 1


def test_a_full_queue_is_no_death():
    started, going = threading.Event(), threading.Event()

    def make():
        def slow(x):
            started.set()
            going.wait(30)
            return x

        return slow

    with local(make, max_queue=1, max_batch_size=1) as deployment, ThreadPoolExecutor(2) as threads:
        policy = deployment.handle
        first = threads.submit(policy, np.ones((1, 1)))
        assert started.wait(10)
        second = threads.submit(policy, np.ones((1, 1)))
        while not deployment.replicas[0].batcher.statistics().waiting:
            time.sleep(0.001)
        with pytest.raises(errors.UnavailableError, match="queue is full"):
            policy(np.ones((1, 1)))
        going.set()
        first.result(10)
        second.result(10)
        assert not deployment.killed


def test_options_change_while_it_runs():
    with local(make_double, replicas=2) as deployment:
        policy = deployment.handle
        policy.update(max_batch_size=2, allowed_batch_sizes=(1, 2))
        with pytest.raises(errors.InvalidArgumentError, match="2 rows"):
            policy(np.ones((3, 1)))
        for bad in ({"max_batch_size": 0}, {"nothing": 1}, {"rows": False}):
            with pytest.raises(errors.InvalidArgumentError):
                policy.update(**bad)
        deployment.kill(0)
        deployment.start(0)  # a new replica has them, too
        assert [replica.batcher.options.max_batch_size for replica in deployment.replicas.values()] == [2, 2]


def test_a_closed_handle_says_so():
    with local(make_double) as deployment:
        policy = deployment.handle
        other = pickle.loads(pickle.dumps(policy))
        policy(np.ones((1, 1)))
        policy.close()
        policy.close()
        for each in (policy, other):
            with pytest.raises(errors.CancelledError, match="net is closed"):
                each(np.ones((1, 1)))


# --- PyTorch ---


def net():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


@pytest.fixture
def torch():
    need("torch")
    import torch

    return torch


def test_gradients_are_those_of_the_module(torch):
    with local(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as deployment:
        policy, mine = deployment.handle, net()
        x = torch.randn(5, 3, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        policy(x * 2).square().sum().backward()  # inside a larger graph
        mine(twin * 2).square().sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
        (g,) = torch.autograd.grad(policy(x).sum(), x)
        torch.testing.assert_close(g, torch.autograd.grad(mine(twin).sum(), twin)[0])
        with torch.no_grad():
            assert not policy(x).requires_grad
        with torch.inference_mode():
            assert policy(x).shape == (5, 2)


def test_one_backward_for_a_batch(torch):
    with local(net, max_wait=5.0, max_batch_size=4) as deployment:
        policy, mine = deployment.handle, net()
        inputs = [torch.randn(1, 3, requires_grad=True) for _ in range(4)]

        def train(x):
            policy(x).square().sum().backward()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(train, inputs))
        seen = policy.statistics()
        assert (seen.batches, seen.backwards) == (1, 1)
        twins = [x.detach().requires_grad_() for x in inputs]
        sum(mine(x).square().sum() for x in twins).backward()
        for x, twin in zip(inputs, twins, strict=True):
            torch.testing.assert_close(x.grad, twin.grad)
        for a, b in zip(deployment.replicas[0].weights.parameters.values(), mine.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_one_loss_over_many_calls(torch):
    with local(net) as deployment:
        policy, mine = deployment.handle, net()
        xs = [torch.randn(1, 3) for _ in range(10)]
        sum(policy(x).square().sum() for x in xs).backward()
        sum(mine(x).square().sum() for x in xs).backward()
        for a, b in zip(deployment.replicas[0].weights.parameters.values(), mine.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_tasks_join(torch):
    with local(net, max_batch_size=8) as deployment:
        policy, mine = deployment.handle, net()
        inputs = [torch.randn(1, 3, requires_grad=True) for _ in range(8)]

        async def train(x):
            (await policy.aio(x)).square().sum().backward()

        async def main():
            await asyncio.gather(*map(train, inputs))
            await policy.aio.join()

        asyncio.run(main())
        for x in inputs:
            twin = x.detach().requires_grad_()
            mine(twin).square().sum().backward()
            torch.testing.assert_close(x.grad, twin.grad)


def test_a_task_may_change_its_gradient_after_the_backward(torch):
    with local(lambda: torch.nn.Identity(), max_batch_size=256) as deployment:

        async def main():
            x = torch.zeros(256, 256, requires_grad=True)
            y = await deployment.handle.aio(x)
            given = torch.ones(256, 256)
            y.backward(given)
            given.zero_()  # before the loop has sent anything
            await deployment.handle.aio.join()
            return x.grad

        assert asyncio.run(main()).unique().tolist() == [1.0]


def test_a_loop_that_ends_before_its_gradients_are_answered(torch):
    with local(net, max_batch_size=2, max_wait=5.0) as deployment:
        policy = deployment.handle

        async def main():
            first, _ = results = await asyncio.gather(policy.aio(torch.ones(1, 3)), policy.aio(torch.ones(1, 3)))
            first.sum().backward()  # the batch waits for the other one
            return results

        results = asyncio.run(main())
        assert not policy._client.outstanding
        with pytest.raises(errors.UnavailableError, match="event loop has ended"):
            policy.join()
        del results


def test_callers_that_do_not_wait(torch):
    with local(net, wait_backward=False) as deployment:
        policy, mine = deployment.handle, net()
        x = torch.randn(2, 3, requires_grad=True)
        policy(x * 1.0).square().sum().backward()
        policy.join()
        twin = x.detach().requires_grad_()
        mine(twin).square().sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)


def test_a_backward_goes_once(torch):
    with local(net) as deployment:
        policy = deployment.handle
        y = policy(torch.randn(2, 3)).sum()
        y.backward(retain_graph=True)
        with pytest.raises(errors.FailedPreconditionError, match="goes back once"):
            y.backward()
        x = torch.randn(2, 3, requires_grad=True)
        with pytest.raises(errors.FailedPreconditionError, match="create_graph"):
            torch.autograd.grad(policy(x).sum(), x, create_graph=True)


def test_a_dropped_result_is_noticed_at_once(torch):
    with local(net, max_wait=5.0, max_batch_size=2, gradient_deadline=30.0) as deployment:
        policy = deployment.handle
        results = {}
        threads = [
            threading.Thread(target=lambda i=i: results.update({i: policy(torch.randn(1, 3))})) for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        del results[0]
        gc.collect()
        with pytest.raises(errors.FailedPreconditionError, match="dropped"):
            results[1].sum().backward()


def test_a_forked_child_leaves_the_parents_results_alone(torch):
    with local(net) as deployment:
        y = deployment.handle(torch.ones(1, 3))
        child = os.fork()
        if not child:
            del y
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        y.sum().backward()
        assert deployment.replicas[0].held_rows == 1


def test_a_lease_ends(torch):
    with local(net, lease=0.05) as deployment:
        y = deployment.handle(torch.randn(1, 3))
        (connection,) = [each for each in deployment.replicas[0].server.connections if each.kept]
        until = time.monotonic() + 20
        while connection.kept:
            time.sleep(0.01)
            assert time.monotonic() < until
        with pytest.raises(errors.NotFoundError, match="result_lease"):
            y.sum().backward()


def test_a_call_with_gradients_is_not_sent_again(torch):
    started, going = threading.Event(), threading.Event()

    def make():
        class Slow(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(3, 1)

            def forward(self, x):
                started.set()
                going.wait(30)
                return self.inner(x)

        return Slow()

    with local(make) as deployment, ThreadPoolExecutor(1) as threads:
        call = threads.submit(deployment.handle, torch.randn(1, 3))
        assert started.wait(10)
        replica = deployment.replicas[0]
        deployment.kill(0)
        with pytest.raises(errors.UnavailableError, match="not sent again"):
            call.result(30)
        going.set()
        replica.batcher.close(drain=False)


def test_other_devices_are_refused(torch):
    with local(net) as deployment, pytest.raises(errors.InvalidArgumentError, match=r"must be on the CPU|dense"):
        deployment.handle(torch.randn(1, 3, device="meta"))
