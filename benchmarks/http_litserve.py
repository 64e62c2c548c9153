"""LitServe in `benchmarks.batched_http`: `python -m benchmarks.http_litserve MODEL PORT`. Its workers import this file."""

from __future__ import annotations

import sys
from typing import Any

import litserve
import torch

from benchmarks.batched_http import SIZE, decode, encode, model_of, wait_of


class API(litserve.LitAPI):  # type: ignore[misc, name-defined]
    def setup(self, device: Any) -> None:
        self.model = model_of(sys.argv[1])

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # an annotation would be a query parameter
        return decode(request["x"])

    def batch(self, inputs: list[Any]) -> Any:
        return torch.cat(inputs)

    def predict(self, x: Any) -> Any:
        return self.model.f(x)

    def unbatch(self, output: Any) -> Any:
        return list(output.split(1))

    def encode_response(self, output: Any) -> Any:
        return {"y": encode(output)}


if __name__ == "__main__":
    server = litserve.LitServer(
        API(max_batch_size=SIZE, batch_timeout=wait_of(sys.argv[1])), accelerator="cpu", timeout=60
    )
    server.run(port=int(sys.argv[2]), log_level="error", generate_client_file=False, access_log=False)
