"""What a remote call costs over a local one, taken apart: CPU time of each part, in microseconds. Needs no Ray.

The client, the keeper and one replica are threads of one process, so the whole call also waits for Python's interpreter lock.
`python -m benchmarks.scale_out_parts`
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import weft
from weft.ray import frames, replica, values
from weft.ray.calls import PLAIN, RemoteCall
from weft.ray.client import Description, client_of
from weft.ray.frames import FrameReader, Kind, Load, ResultMessage
from weft.ray.handle import RemoteBatcher
from weft.ray.handshake import Secret
from weft.ray.keeper import Keeper
from weft.ray.values import encoder

WIDTH, COUNT, ROUNDS = 64, 500, 7


def least(function: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the microseconds of a call by a clock: the least of some rounds."""
    found = []
    for _ in range(ROUNDS):
        began = clock()
        for _ in range(COUNT):
            function()
        found.append((clock() - began) / COUNT)
    return min(found) * 1e6


def cpu(function: Callable[[], Any]) -> float:
    """Return the CPU time of a call in this thread."""
    return least(function, time.thread_time)


def wall(function: Callable[[], Any]) -> float:
    """Return the time of a call."""
    return least(function, time.perf_counter)


async def wall_of_tasks(aio: Any, x: Any) -> float:
    """Return the time of a call by a task."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(COUNT):
            await aio(x)
        found.append((time.perf_counter() - began) / COUNT)
    return min(found) * 1e6


def parts(policy: RemoteBatcher, x: Any, y: Any) -> dict[str, float]:
    """Return the CPU time of the parts of a remote call."""
    client = client_of(policy._description)
    call = RemoteCall(client, (x,), {}, PLAIN)
    remote = client.choose(1)
    here, there = socket.socketpair()
    reader = FrameReader(frames.MOST_ARRAYS)

    def request() -> bytes:
        return bytes(frames.pack(Kind.CALL, 1, encoder.encode(call._message), call._buffers)[0])

    def through(data: bytes) -> Any:
        here.send(data)
        return reader.advance(there.recv_into(reader.room()))[0]

    def answer() -> bytes:
        outputs: list[Any] = []
        tree = values.pack_tree(y, outputs)
        specs, buffers = values.pack_arrays(outputs)
        message: Any = ResultMessage(0, Load(), tree, specs)  # type: ignore[arg-type]
        return bytes(frames.pack(Kind.RESULT, 1, encoder.encode(message), buffers)[0])

    asked, answered, data = through(request()), through(answer()), request()
    found = {
        "client: choose a replica": cpu(lambda: client.choose(1)),
        "client: arguments to a frame": cpu(lambda: RemoteCall(client, (x,), {}, PLAIN)) + cpu(request),
        "send, read, cut into frames; twice": 2 * cpu(lambda: through(data)),
        "replica: frame to arguments": cpu(
            lambda: values.unpack_arrays(replica._call.decode(asked.message).arrays, asked.arrays)
        ),
        "replica: result to a frame": cpu(answer),
        "client: frame to a result": cpu(lambda: call.result(remote, client.link(remote), answered, False)),
    }
    here.close()
    there.close()
    return found


def main() -> None:
    """Run and print."""
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 8))
    x, y = torch.randn(1, WIDTH), torch.randn(1, 8)
    secret = Secret.new()
    keeper = Keeper(secret, "net", None, None, 60.0)
    keeping = keeper.serve("127.0.0.1")
    served = replica.Replica(net, {"max_batch_size": 64}, 600.0)
    serving = served.serve(secret, "127.0.0.1")
    keeper.add(0, serving.addresses, os.getpid(), serving.id)
    policy = RemoteBatcher(Description("benchmark", "net", secret, keeping.addresses, keeping.id))
    with torch.no_grad(), weft.batched(net, max_batch_size=64) as local:
        found = {
            "the network itself": cpu(lambda: net(x)),
            "local call by a thread, which runs the batch itself": wall(lambda: local(x)),
            "local call by a task, whose batch a worker thread runs": asyncio.run(wall_of_tasks(local.aio, x)),
            "remote call, whole": wall(lambda: policy(x)),
            **parts(policy, x, y),
        }
    for name, figure in found.items():
        print(f"{name:<55} {figure:7.1f} us")
    policy.close()
    serving.stop()
    keeping.stop()


if __name__ == "__main__":
    main()
