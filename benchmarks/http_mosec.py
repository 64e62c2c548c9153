"""mosec in `benchmarks.batched_http`: `python -m benchmarks.http_mosec MODEL PORT`. Its workers import this file."""

from __future__ import annotations

import os
import sys
from typing import Any

import mosec

from benchmarks.batched_http import SIZE, decode, encode, model_of, wait_of
from benchmarks.batched_peers import on_items


class Worker(mosec.Worker):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.run = on_items(model_of(os.environ["WEFT_BENCHMARK_MODEL"]))

    def forward(self, data: list[Any]) -> Any:
        return [{"y": encode(y)} for y in self.run([decode(each["x"]) for each in data])]


if __name__ == "__main__":
    model, port = sys.argv[1:3]
    os.environ["WEFT_BENCHMARK_MODEL"] = model
    sys.argv = ["mosec", "--port", port, "--address", "127.0.0.1", "--log-level", "error", "--timeout", "60000"]
    server = mosec.Server()
    server.append_worker(Worker, num=1, max_batch_size=SIZE, max_wait_time=round(wait_of(model) * 1000))
    server.run()
