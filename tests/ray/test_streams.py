"""Remote streams, and functions that are awaited."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from support.libraries import need

need("msgspec")
need("optree")

from support.ray_local import local  # noqa: E402

from weft import errors  # noqa: E402


def make_count():
    def count(x):
        for i in range(5):
            if i == 3 and (x > 100).any():
                raise ValueError("too large")
            yield x + i

    return count


def make_async_count():
    async def count(x):
        for i in range(5):
            await asyncio.sleep(0)
            yield x + i

    return count


@pytest.mark.parametrize("make", [make_count, make_async_count])
def test_chunks_come_in_order(make):
    with local(make) as deployment:
        policy = deployment.handle
        assert [chunk.tolist() for chunk in policy.stream(np.zeros((1, 1)))] == [[[i]] for i in range(5)]

        async def one(start):
            return [chunk.item() async for chunk in policy.aio.stream(np.full((1, 1), start))]

        async def main():
            return await asyncio.gather(*[one(10.0 * i) for i in range(8)])

        assert asyncio.run(main()) == [[10.0 * i + k for k in range(5)] for i in range(8)]
        with pytest.raises(errors.FailedPreconditionError, match="stream"):
            policy(np.zeros((1, 1)))


def test_an_error_after_some_chunks():
    with local(make_count) as deployment:
        found = []
        with pytest.raises(ValueError, match="too large"):
            found.extend(iter(deployment.handle.stream(np.full((1, 1), 200.0))))
        stream = deployment.handle.stream(np.full((1, 1), 200.0))
        assert next(stream).item() == 200.0


def test_a_caller_that_leaves_early():
    with local(make_count) as deployment:
        policy = deployment.handle
        with policy.stream(np.zeros((1, 1))) as stream:
            assert next(stream).item() == 0.0
        assert list(stream) == []
        assert len(list(policy.stream(np.zeros((1, 1))))) == 5
        until = time.monotonic() + 20
        while any(connection.tasks for connection in deployment.replicas[0].server.connections):
            assert time.monotonic() < until
            time.sleep(0.001)


def test_a_function_that_is_awaited():
    def make():
        async def double(x):
            await asyncio.sleep(0)
            return x * 2

        return double

    with local(make) as deployment:
        assert deployment.handle(np.ones((2, 1))).tolist() == [[2.0], [2.0]]


def test_a_replica_that_is_gone():
    with local(make_count, replicas=3) as deployment:
        policy = deployment.handle
        policy._client.refresh()
        for remote in policy._client._table[0]:
            policy._client.link(remote)
        deployment.kill(0)
        deployment.kill(1)
        for _ in range(4):
            assert len(list(policy.stream(np.zeros((1, 1))))) == 5

            async def main():
                return [chunk async for chunk in policy.aio.stream(np.zeros((1, 1)))]

            assert len(asyncio.run(main())) == 5


def test_an_interrupted_stream_is_over(monkeypatch):
    with local(make_count) as deployment:
        stream = deployment.handle.stream(np.zeros((1, 1)))
        assert next(stream).item() == 0.0
        stream._pending.chunks.clear()

        def interrupt(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(stream._pending.link, "wait_for", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        assert list(stream) == []


def test_what_does_not_stream():
    with local(lambda: np.tanh) as deployment, pytest.raises(errors.OpError):
        list(deployment.handle.stream(np.ones((1, 1))))
