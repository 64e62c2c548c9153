"""A process's side of a deployment: how it finds replicas, loses them, and what it leaves behind."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from math import inf

import numpy as np
import pytest
from support.libraries import need

need("msgspec")
need("optree")

from support.ray_local import local  # noqa: E402

from weft import errors  # noqa: E402
from weft.ray import calls, client, values  # noqa: E402
from weft.ray import link as link_module  # noqa: E402
from weft.ray.calls import CallOptions, RemoteCall  # noqa: E402
from weft.ray.requests import Pending  # noqa: E402

X = np.ones((1, 1))


def make_double():
    return lambda x: 2 * x


def test_many_callers_ask_the_keeper_once():
    with local(make_double) as deployment:
        asked, enough = [], threading.Event()
        where = deployment.keeper.ask_where

        def count(*given):
            asked.append(given)
            return where(*given)

        deployment.keeper.ask_where = count
        policy = deployment.handle
        real = policy._client.refresh
        policy._client.refresh = lambda: (enough.wait(20), real())

        async def main():
            waiting = [asyncio.ensure_future(policy.aio(X)) for _ in range(64)]
            await asyncio.sleep(0)
            enough.set()
            return await asyncio.gather(*waiting)

        with ThreadPoolExecutor(4) as threads:
            others = [threads.submit(policy, X) for _ in range(4)]
            assert len(asyncio.run(main())) == 64
            assert [each.result(20).item() for each in others] == [2.0] * 4
        assert len(asked) == 1


def test_calls_go_on_while_the_keeper_does_not_answer():
    with local(make_double, replicas=2) as deployment:
        policy = deployment.handle
        policy(X)
        deployment.keeper.server.loop.call_soon_threadsafe((waiting := threading.Event()).wait, 20)
        try:
            deployment.kill(0)
            began = time.monotonic()
            for _ in range(20):
                assert policy(X).item() == 2.0
            assert time.monotonic() - began < 15
        finally:
            waiting.set()


def test_a_handle_carries_the_version_it_has_heard():
    with local(make_double) as deployment:
        policy = deployment.handle
        assert policy.version == 0
        deployment.keeper.version = 3
        policy.statistics()
        assert policy.version == 3
        sent = pickle.dumps(policy)
        client._clients.clear()  # as in a process that has not called
        try:
            assert pickle.loads(sent).version == 3
        finally:
            client.client_of(policy._description)


def test_a_full_queue_of_a_replica():
    is_open = threading.Event()

    def make():
        def wait(x):
            assert is_open.wait(30)
            return x

        return wait

    with local(make, max_batch_size=1, max_queue=1) as deployment, ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(deployment.handle, X) for _ in range(3)]
        try:
            (refused,) = wait(calls, 30, FIRST_COMPLETED).done
            assert refused.exception().http_status == 429
        finally:
            is_open.set()


def test_a_call_waits_for_a_replica_within_its_deadline(monkeypatch):
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.0)
    with local(make_double) as deployment:
        policy = deployment.handle
        policy(X)
        deployment.kill(0)
        with pytest.raises(errors.DeadlineExceededError):
            policy.call(X, deadline=0.1)

        async def main():
            with pytest.raises(errors.DeadlineExceededError):
                await policy.aio.call(X, deadline=0.1)

        asyncio.run(main())
        deployment.start(0)
        assert policy.call(X, deadline=20.0).item() == 2.0


def test_a_second_try_has_the_rest_of_the_deadline():
    sent = []

    class Link:
        def request(self, kind, message, *_, **__):
            sent.append(message.deadline)

    with local(make_double) as deployment:
        call = RemoteCall(deployment.handle._client, (X,), {}, CallOptions(deadline=5.0))
        until = call.until
        for _ in range(3):
            call.send(Link())
        assert sent[0] == 5.0 > sent[1] >= sent[2]
        assert call.until == until
        call.end = time.monotonic()
        with pytest.raises(errors.DeadlineExceededError):
            call.send(Link())
        assert RemoteCall(deployment.handle._client, (X,), {}, CallOptions()).until == inf


def test_a_replica_whose_connection_broke_is_used_again(monkeypatch):
    with local(make_double) as deployment:
        policy = deployment.handle
        policy(X)
        (remote,) = policy._client._table[0]
        monkeypatch.setattr(client, "LOST_SECONDS", 0.2)
        policy._client.link(remote).close()
        assert policy(X).item() == 2.0
        assert policy._client._table[0] != [remote]
        policy._client.lose(remote)  # a thread that was late: the new connection stays
        assert policy._client._table[0]


def test_a_call_waits_if_another_thread_loses_the_last_replica():
    with local(make_double) as deployment:
        found = deployment.handle._client
        found.refresh()
        real, asked = found._find, []

        def find():
            asked.append(found._use([]) if not asked else None)
            return real() if len(asked) > 1 else None

        found._find = find
        assert deployment.handle(X).item() == 2.0
        assert len(asked) == 2


def test_every_client_hears_of_changed_options():
    with local(make_double, deadline=1.0) as deployment:
        policy = deployment.handle
        policy(X)
        described = policy._description.to_bytes()
        other, late = (client.Client(client.Description.from_bytes(described)) for _ in range(2))
        link = other.link(other.choose(1))
        policy.update(deadline=50.0, gradient_deadline=70.0)
        link.listen(20)
        late.refresh()
        for each in (policy._client, other, late):
            assert (each.description.deadline, each.description.gradient_deadline) == (50.0, 70.0)
        other.disconnect()
        late.disconnect()


def test_a_call_that_is_lost_at_the_close_says_so():
    with local(make_double) as deployment:
        found = deployment.handle._client
        call = RemoteCall(found, (X,), {}, CallOptions(is_vjp=True))
        remote = found.choose(1)
        link = found.link(remote)
        link.break_off("the test ends it")
        found.close()
        with pytest.raises(errors.CancelledError, match="net is closed"):
            call.after_loss(remote, link, link.broken)


def test_a_deployment_that_has_ended_leaves_no_sockets(monkeypatch):
    monkeypatch.setattr(link_module, "CHECK_SECONDS", 0.0)
    with local(make_double) as deployment:
        deployment.handle(X)
        found = deployment.handle._client
        links = [found._keeper, found._table[0][0].link]
        deployment.replicas[0].server.stop()
        deployment.keeper.server.stop()
        with local(make_double) as another:
            another.handle(X)
        assert [link._socket.fileno() for link in links] == [-1, -1]


def test_loops_that_have_ended_leave_nothing():
    with local(make_double) as deployment:
        policy = deployment.handle
        for _ in range(3):
            asyncio.run(policy.aio(X))
        assert not policy._client._table[0][0].loop_links
        loop = asyncio.new_event_loop()  # closed without the end of its generators
        loop.run_until_complete(policy.aio(X))
        link = policy._client._table[0][0].loop_links[loop].result()
        link.break_off("the test ends")
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert not policy._client._table[0][0].loop_links


def test_a_result_that_cannot_be_read_is_dropped(monkeypatch):
    def vjp(x):
        return 2 * x, lambda g: 2 * g

    with local(make_double, vjp=vjp) as deployment:
        policy = deployment.handle
        policy(X)

        def fail(*_):
            raise errors.InternalError("no")

        with monkeypatch.context() as patched:
            patched.setattr(calls, "values", type("Values", (), {**vars(values), "unpack_arrays": staticmethod(fail)}))
            with pytest.raises(errors.InternalError):
                policy.vjp(X)
        until = time.monotonic() + 20
        while any(connection.kept for connection in deployment.replicas[0].server.connections):
            assert time.monotonic() < until
            time.sleep(0.001)


def test_join_waits_for_gradients_that_another_thread_adds():
    with local(make_double) as deployment, ThreadPoolExecutor(1) as threads:
        policy = deployment.handle
        policy(X)
        found = policy._client
        link = found.link(found._table[0][0])
        pending = Pending(link, 99, lambda _: None)
        pending.done = True
        found.outstanding[pending] = None
        joining = threads.submit(policy.join)
        with pytest.raises(TimeoutError):
            joining.result(0.05)
        found.outstanding.pop(pending)
        joining.result(20)


def test_statistics_and_updates_leave_out_a_replica_that_has_just_died():
    with local(make_double, replicas=2) as deployment:
        policy = deployment.handle
        first = deployment.replicas[0]

        async def die(*_):
            first.server.loop.call_soon(lambda: [each.close() for each in list(first.server.connections)])
            await asyncio.sleep(10)

        first.ask_statistics = die
        assert len(policy.statistics(per_replica=True)) == 1
        deployment.start(0).ask_check_update = die
        first = deployment.replicas[0]
        policy.update(max_batch_size=7)
        assert deployment.replicas[1].batcher.options.max_batch_size == 7
        assert deployment.start(0).batcher.options.max_batch_size == 7
