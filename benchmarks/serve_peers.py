"""The servers that `benchmarks/serve.py` compares, each a process: `python serve_peers.py NAME MODEL WIRE PORT`.

It runs with the Python of the peers, which need not have weft. All take the same body, in JSON or in binary form, decode it, run
the same function, and encode what it returns. Batches have up to 64 rows; those who must wait for more rows wait for 1 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import msgspec
import numpy as np

FEATURES, SIZE, WAIT = 64, 64, 0.001
if __name__ == "__main__":
    os.environ["WEFT_PEER"] = " ".join(sys.argv[1:5])  # for processes that import this file again
NAME, MODEL, WIRE, PORT = os.environ["WEFT_PEER"].split()


def make(model: str) -> Any:
    """The function on whole batches."""
    draw = np.random.default_rng(0).standard_normal
    if model == "echo":
        return lambda x: x
    if model == "digits":  # as large as that of examples/digits.py
        first, second = draw((64, 128)).astype(np.float32) / 8, draw((128, 10)).astype(np.float32) / 11

        def digits(x: np.ndarray) -> np.ndarray:
            y = np.maximum(x / 16 @ first, 0) @ second
            e = np.exp(y - y.max(axis=1, keepdims=True))
            return e / e.sum(axis=1, keepdims=True)

        return digits
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 2048),
        torch.nn.ReLU(),
        torch.nn.Linear(2048, 2048),
        torch.nn.ReLU(),
        torch.nn.Linear(2048, 10),
    )

    def mlp(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return net(torch.from_numpy(x)).numpy()

    return mlp


class Input(msgspec.Struct):
    """An input in JSON."""

    name: str
    shape: list[int]
    datatype: str
    data: list[float] = []


class Body(msgspec.Struct):
    """A request in JSON."""

    inputs: list[Input]


def codec() -> tuple[Any, Any]:
    """Decode a body to one row or more, and encode rows: msgspec for JSON, the bytes after the header for binary."""
    read, write = msgspec.json.Decoder(Body).decode, msgspec.json.Encoder().encode

    def decode(body: bytes) -> np.ndarray:
        if WIRE == "binary":
            return np.frombuffer(body[-4 * FEATURES :], np.float32).reshape(1, FEATURES).copy()
        x = read(body).inputs[0]
        return np.array(x.data, np.float32).reshape(x.shape)

    def encode(y: np.ndarray) -> bytes:
        head = {"name": "output", "datatype": "FP32", "shape": list(y.shape)}
        if WIRE == "binary":
            return write({"model_name": MODEL, "outputs": [head]}) + y.tobytes()
        return write({"model_name": MODEL, "outputs": [{**head, "data": y.ravel().tolist()}]})

    return decode, encode


def run_uvicorn(app: Any) -> None:
    import uvicorn

    uvicorn.run(
        app, port=int(PORT), http="httptools", loop="uvloop", log_level="warning", access_log=False, lifespan="off"
    )


def bare() -> None:
    """A bare ASGI callable: decodes, runs the function for this request alone, answers."""
    f, (decode, encode) = make(MODEL), codec()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        y = encode(f(decode((await receive())["body"])))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(y))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": y})

    run_uvicorn(app)


if NAME.startswith("fastapi"):
    from fastapi import FastAPI, Request, Response  # it looks annotations up in the module


def fastapi(batch: bool = False) -> None:
    """FastAPI, with or without a batcher on the event loop, as people write it."""
    f, (decode, encode) = make(MODEL), codec()
    app, waiting, wake = FastAPI(), [], asyncio.Event()

    async def work() -> None:
        while True:
            await wake.wait()
            wake.clear()
            await asyncio.sleep(0)
            while waiting:
                now, waiting[:] = waiting[:SIZE], waiting[SIZE:]
                y = await asyncio.to_thread(f, np.concatenate([x for x, _ in now])) if MODEL == "mlp" else f(
                    np.concatenate([x for x, _ in now])
                )  # fmt: skip
                for i, (_, future) in enumerate(now):
                    future.set_result(y[i : i + 1])

    task: list[Any] = []

    async def ask(x: np.ndarray) -> np.ndarray:
        if not batch:
            return f(x)
        if not task:
            task.append(asyncio.create_task(work()))
        future = asyncio.get_running_loop().create_future()
        waiting.append((x, future))
        wake.set()
        return await future

    if WIRE == "json":

        @app.post("/")
        async def from_json(body: dict[str, Any]) -> dict[str, Any]:
            x = body["inputs"][0]
            y = await ask(np.array(x["data"], np.float32).reshape(x["shape"]))
            return {"outputs": [{"name": "output", "shape": list(y.shape), "data": y.ravel().tolist()}]}

    else:

        @app.post("/")
        async def from_bytes(request: Request) -> Response:
            return Response(encode(await ask(decode(await request.body()))))

    run_uvicorn(app)


if NAME == "litserve":
    import litserve as ls

    class LitApi(ls.LitAPI):
        """The function behind LitServe."""

        def setup(self, device: str) -> None:
            self.f = make(MODEL)

        def decode_request(self, request):  # an annotation would be the schema
            return np.array(request["inputs"][0]["data"], np.float32)

        def predict(self, x: np.ndarray) -> np.ndarray:
            return self.f(x)

        def encode_response(self, output):
            return {"outputs": [{"name": "output", "shape": [1, len(output)], "data": output.tolist()}]}


def litserve() -> None:
    """LitServe."""
    server = ls.LitServer(LitApi(max_batch_size=SIZE, batch_timeout=WAIT), accelerator="cpu", track_requests=False)
    server.run(port=int(PORT), host="127.0.0.1", log_level="warning", generate_client_file=False, num_api_servers=1)


if NAME == "mosec":
    from mosec import Server, Worker

    class MosecApi(Worker):
        """The function behind mosec."""

        def __init__(self) -> None:
            super().__init__()
            self.f, (self.read, self.write) = make(MODEL), codec()

        def deserialize(self, data: bytes) -> Any:
            return self.read(data)

        def serialize(self, data: Any) -> bytes:
            return self.write(data)

        def forward(self, data: Any) -> Any:
            return list(self.f(np.concatenate(data))[:, None])


def mosec() -> None:
    """mosec."""
    sys.argv = [sys.argv[0], "--port", PORT, "--address", "127.0.0.1", "--log-level", "error"]
    server = Server()
    server.append_worker(MosecApi, num=1, max_batch_size=SIZE, max_wait_time=1)
    server.run()


if NAME == "bentoml":
    import bentoml as bm

    @bm.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
    class BentoApi:
        """The function behind BentoML, with its adaptive batching."""

        def __init__(self) -> None:
            self.f = make(MODEL)

        @bm.api(batchable=True, max_batch_size=SIZE, max_latency_ms=1000, route="/predict")
        def predict(self, x: np.ndarray) -> np.ndarray:
            """Return the outputs of a batch."""
            return self.f(np.asarray(x, np.float32))


def bentoml() -> None:
    """BentoML."""
    os.environ["BENTOML_DO_NOT_TRACK"] = "True"
    folder, name = os.path.split(os.path.abspath(__file__))
    service = f"{name.removesuffix('.py')}:BentoApi"
    command = [
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        service,
        "--working-dir",
        folder,
        "--port",
        PORT,
        "--host",
        "127.0.0.1",
    ]
    os.execv(sys.executable, command)


def ray() -> None:
    """Ray Serve, with @serve.batch."""
    import time

    import ray as r
    from ray import serve

    r.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    from starlette.responses import Response

    serve.start(http_options={"port": int(PORT), "host": "127.0.0.1"})
    model, is_binary = MODEL, WIRE == "binary"

    @serve.deployment(max_ongoing_requests=1000)
    class Api:
        def __init__(self) -> None:
            self.f = make(model)

        @serve.batch(max_batch_size=SIZE, batch_wait_timeout_s=WAIT)
        async def rows(self, xs: list[Any]) -> list[Any]:
            return list(self.f(np.concatenate(xs))[:, None])

        async def __call__(self, request: Any) -> Any:
            body = await request.body()
            if is_binary:
                y = await self.rows(np.frombuffer(body[-4 * FEATURES :], np.float32).reshape(1, FEATURES).copy())
                head = {"outputs": [{"name": "output", "datatype": "FP32", "shape": list(y.shape)}]}
                return Response(json.dumps(head).encode() + y.tobytes())
            x = json.loads(body)["inputs"][0]
            y = await self.rows(np.array(x["data"], np.float32).reshape(x["shape"]))
            return {"outputs": [{"name": "output", "shape": list(y.shape), "data": y.ravel().tolist()}]}

    serve.run(Api.bind(), route_prefix="/")
    while True:
        time.sleep(1)


def weft(on_loop: bool = MODEL != "mlp") -> None:
    """weft serve. Tiny functions run in the event loop, as with the peers that have no process of their own for them."""
    from weft.serve import App, model
    from weft.serve.server import make as make_server
    from weft.serve.server import run

    example = {"x": np.zeros((1, FEATURES), np.float32)}
    served = model(make(MODEL), name=MODEL, example=example, max_batch_size=SIZE, on_loop=on_loop)
    sys.exit(run(make_server(App([served], access_log="none"), port=int(PORT), told=lambda _: None)))


def weft_worker() -> None:
    """weft serve as it is by default: batches run in a worker thread."""
    weft(on_loop=False)


def fastapi_batcher() -> None:
    """FastAPI with a batcher written by hand."""
    fastapi(batch=True)


if __name__ == "__main__":
    globals()[NAME]()
