"""Remote calls on Ray: weft against plain actors, Ray Serve's `@serve.batch` and TorchRL's InferenceServer.

1, 4 and 16 processes call. Every contestant has one replica with the same small network, and is called by the same client
processes, one row a call. The contestants take turns in each round; the figure is the median. Peers that are not installed
(`pip install 'ray[serve]' torchrl`) are left out and said to be. `python -m benchmarks.scale_out --rounds 3`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

# As in Ray's workers. PyTorch's own setting does not reach the threads of a batcher.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import torch

import weft
import weft.ray

WIDTH = 64
TICKS = os.sysconf("SC_CLK_TCK")


def make_net() -> torch.nn.Module:
    """Return the network that all contestants serve."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 8))


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


# --- contestants: forward(x) returns the result, both(x) goes forward and back ---


class Weft:
    """`weft.ray.deploy`."""

    def __init__(self) -> None:
        self.policy = weft.ray.deploy(make_net, max_batch_size=64)
        self.pids = [pid for _, _, pid, _ in self.policy._client.ask_keeper("where")[0][1]]

    def client(self) -> Any:
        policy = self.policy

        class Calls:
            def forward(self, x: Any) -> Any:
                with torch.no_grad():
                    return policy(x)

            def both(self, x: Any) -> Any:
                policy(x).sum().backward()

            async def aio(self, x: Any) -> Any:
                return await policy.aio(x)

        return Calls()

    def close(self) -> None:
        self.policy.close()


class PlainActor:
    """One Ray actor: a call of a method for the forward, another for the backward."""

    def __init__(self) -> None:
        @ray.remote(num_cpus=1)
        class Server:
            def __init__(self) -> None:
                self.net, self.kept = make_net(), {}

            def forward(self, x: Any) -> Any:
                with torch.no_grad():
                    return self.net(x)

            def forward_kept(self, key: Any, x: Any) -> Any:
                self.kept[key] = self.net(x)
                return self.kept[key].detach()

            def backward(self, key: Any, g: Any) -> None:
                self.kept.pop(key).backward(g)

            def pid(self) -> int:
                return os.getpid()

        self.server = Server.remote()
        self.pids = [ray.get(self.server.pid.remote())]

    def client(self) -> Any:
        server = self.server

        class Calls:
            number = 0

            def forward(self, x: Any) -> Any:
                return ray.get(server.forward.remote(x))

            def both(self, x: Any) -> Any:
                self.number += 1
                key = (os.getpid(), self.number)
                y = ray.get(server.forward_kept.remote(key, x))
                ray.get(server.backward.remote(key, torch.ones_like(y)))

        return Calls()

    def close(self) -> None:
        ray.kill(self.server)


class Serve:
    """Ray Serve with `@serve.batch`, called by a handle."""

    def __init__(self) -> None:
        from ray import serve

        @serve.deployment(num_replicas=1, max_ongoing_requests=256)
        class Model:
            def __init__(self) -> None:
                self.net = make_net()

            @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0)
            async def run(self, xs: list[Any]) -> list[Any]:
                with torch.no_grad():
                    return list(self.net(torch.cat(xs)).split(1))

            async def __call__(self, x: Any) -> Any:
                return await self.run(x)

        self.handle = serve.run(Model.bind(), name="benchmark", route_prefix=None)
        self.pids: list[int] = []

    def client(self) -> Any:
        handle = self.handle

        class Calls:
            def forward(self, x: Any) -> Any:
                return handle.remote(x).result()

        return Calls()

    def close(self) -> None:
        from ray import serve

        serve.shutdown()


class TorchRL:
    """TorchRL's InferenceServer in a Ray actor, with Ray's queues as its transport."""

    def __init__(self) -> None:
        from tensordict.nn import TensorDictModule
        from torchrl.modules.inference_server import InferenceServer

        def policy() -> Any:
            return TensorDictModule(make_net(), in_keys=["x"], out_keys=["y"])

        self.server = InferenceServer(
            policy_factory=policy,
            service_backend="ray",
            transport="ray",
            max_batch_size=64,
            timeout=0.001,
            service_backend_options={"remote_config": {"num_cpus": 1}},
        )
        if hasattr(self.server, "start"):
            self.server.start()
        self.pids: list[int] = []

    def client(self) -> Any:
        client = self.server.client()

        class Calls:
            def forward(self, x: Any) -> Any:
                from tensordict import TensorDict

                return client(TensorDict({"x": x[0]}))["y"]

        return Calls()

    def close(self) -> None:
        self.server.shutdown()


@ray.remote(num_cpus=0)
class Client:
    """A process that calls."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.calls: dict[str, Any] = {}

    def use(self, name: str, calls: Any) -> None:
        """Keep the calls of a contestant, and try them."""
        self.calls[name] = calls
        calls.forward(torch.randn(1, WIDTH))

    def run(self, name: str, method: str, count: int) -> tuple[float, float, float]:
        """Call `count` times; return when it began and ended, and the CPU seconds of this process."""
        call, x = getattr(self.calls[name], method), torch.randn(1, WIDTH)
        call(x)
        cpu, began = time.process_time(), time.time()
        for _ in range(count):
            call(x)
        return began, time.time(), time.process_time() - cpu

    def run_tasks(self, name: str, tasks: int, count: int) -> tuple[float, float, float]:
        """Call `count` times from tasks of one event loop."""
        aio, x = self.calls[name].aio, torch.randn(1, WIDTH)

        async def one(count: int) -> None:
            for _ in range(count):
                await aio(x)

        async def main() -> tuple[float, float, float]:
            await asyncio.gather(*[one(1) for _ in range(tasks)])
            cpu, began = time.process_time(), time.time()
            await asyncio.gather(*[one(count // tasks) for _ in range(tasks)])
            return began, time.time(), time.process_time() - cpu

        with torch.no_grad():  # of this thread, and so of all tasks
            return asyncio.run(main())


class Result:
    """The rounds of one contestant in one row."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.client_cpu: list[float] = []
        self.server_cpu: list[float] = []

    def as_dict(self) -> dict[str, float]:
        """Return the medians: calls per second, CPU microseconds per call."""
        return {
            "calls_per_second": statistics.median(self.rates),
            "client_cpu_us": statistics.median(self.client_cpu) * 1e6,
            "server_cpu_us": statistics.median(self.server_cpu) * 1e6,
        }


def measure(contestant: Any, refs: Any, calls: int, result: Result) -> None:
    """Wait for the clients of a round and add its figures."""
    before = sum(map(cpu_of, contestant.pids))
    found = ray.get(refs())
    after = sum(map(cpu_of, contestant.pids))
    result.rates.append(calls / (max(end for _, end, _ in found) - min(begin for begin, _, _ in found)))
    result.client_cpu.append(sum(cpu for _, _, cpu in found) / calls)
    result.server_cpu.append((after - before) / calls)


def local_rates(count: int) -> dict[str, float]:
    """Return the calls per second of the local batcher, from 1 and 16 threads."""
    from concurrent.futures import ThreadPoolExecutor

    found = {}
    with weft.batched(make_net(), max_batch_size=64) as policy:

        def work(count: int) -> None:
            x = torch.randn(1, WIDTH)
            with torch.no_grad():
                for _ in range(count):
                    policy(x)

        for threads in (1, 16):
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, [10] * threads))
                began = time.perf_counter()
                list(pool.map(work, [count // threads] * threads))
                found[f"local batcher, {threads} threads"] = count / (time.perf_counter() - began)
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=800, help="calls of a contestant in a row and round")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ray.init(
        address="local", num_cpus=32, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False
    )
    contestants: dict[str, Any] = {}
    for name, make in (("weft", Weft), ("plain actor", PlainActor), ("Ray Serve", Serve), ("TorchRL", TorchRL)):
        try:
            contestants[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}")
    clients = [Client.remote() for _ in range(max(options.processes))]
    for name, contestant in contestants.items():
        ray.get([client.use.remote(name, contestant.client()) for client in clients])
    rows: dict[str, dict[str, Result]] = {}
    for turn in range(options.rounds):
        names = list(contestants) if turn % 2 == 0 else list(reversed(contestants))
        for method in ("forward", "both"):
            for processes in options.processes:
                count = max(options.calls // processes, 20)
                row = rows.setdefault(f"{method}, {processes} processes", {})
                for name in names:
                    if method == "both" and name not in ("weft", "plain actor"):
                        continue
                    chosen = clients[:processes]
                    measure(
                        contestants[name],
                        lambda chosen=chosen, name=name, count=count, method=method: [
                            client.run.remote(name, method, count) for client in chosen
                        ],
                        count * processes,
                        row.setdefault(name, Result()),
                    )
        row = rows.setdefault("forward, 64 tasks in 4 processes", {})
        measure(
            contestants["weft"],
            lambda: [client.run_tasks.remote("weft", 16, options.calls) for client in clients[:4]],
            4 * (options.calls // 16 * 16),
            row.setdefault("weft", Result()),
        )
    found = {row: {name: result.as_dict() for name, result in by_name.items()} for row, by_name in rows.items()}
    for row, by_name in found.items():
        print(row)
        for name, figures in by_name.items():
            ratio = by_name["weft"]["calls_per_second"] / figures["calls_per_second"]
            cpu = f"{figures['client_cpu_us']:6.0f} + {figures['server_cpu_us']:.0f} us CPU"
            print(f"  {name:<12} {figures['calls_per_second']:8.0f} calls/s   x{ratio:.2f}   {cpu}")
    for contestant in contestants.values():
        contestant.close()
    ray.shutdown()
    local = local_rates(options.calls)
    for name, rate in local.items():
        print(f"{name}: {rate:.0f} calls/s")
    if options.json:
        options.json.write_text(json.dumps({"rows": found, "local": local}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
