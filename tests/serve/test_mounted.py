"""The app inside FastAPI and Starlette services, and the statuses of weft's errors in handlers of their own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager

import numpy as np
import pytest
from support.libraries import need
from support.serving import need_server, oip

import weft

need_server()
need("starlette")
need("fastapi")

X = np.ones((2, 3), np.float32)


async def ask(service, method, path, body=None, scope=(), then=lambda: asyncio.Event().wait()):
    """The status, JSON and headers of a request to an ASGI application; `then` gives the message after the body."""
    sent, raw = [], b"" if body is None else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive():
        return messages.pop(0) if messages else await then()

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))]
    given = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
             "raw_path": path.encode(), "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1),
             "server": ("127.0.0.1", 80), "scheme": "http", "root_path": "", "state": {}}  # fmt: skip
    await asyncio.wait_for(service({**given, **dict(scope)}, receive, send), 30)
    text = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(text) if text else None, dict(sent[0]["headers"])


@asynccontextmanager
async def alive(service):
    """The lifespan of an ASGI application, as a server runs it."""
    given, told = asyncio.Queue(), asyncio.Queue()
    task = asyncio.ensure_future(
        service({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, given.get, told.put)
    )
    await given.put({"type": "lifespan.startup"})
    assert (await asyncio.wait_for(told.get(), 30))["type"] == "lifespan.startup.complete"
    yield
    await given.put({"type": "lifespan.shutdown"})
    assert (await asyncio.wait_for(told.get(), 30))["type"] == "lifespan.shutdown.complete"
    await task


def services(served, lifespan):
    """The app mounted at /models in each framework."""
    from fastapi import FastAPI
    from starlette.applications import Starlette
    from starlette.routing import Mount

    fast = FastAPI(lifespan=lifespan)
    fast.mount("/models", served)
    return {"fastapi": fast, "starlette": Starlette(routes=[Mount("/models", served)], lifespan=lifespan)}


def made():
    def double(x):
        return 2 * x

    return weft.serve.app(weft.serve.model(double, example={"x": X[:1]}))


@pytest.mark.parametrize("framework", ["fastapi", "starlette"])
class TestMounted:
    def test_with_its_lifespan(self, framework):
        async def main():
            served = made()
            service = services(served, served.lifespan)[framework]
            async with alive(service):
                assert served.models["double"].is_ready  # before any request
                status, answer, headers = await ask(service, "POST", "/models/v2/models/double/infer", oip(x=X))
                assert (status, answer["outputs"][0]["data"]) == (200, 6 * [2.0])
                assert headers[b"weft-model-version"] == b"1"
                assert (await ask(service, "POST", "/models/v1/models/double:predict", {"instances": X.tolist()}))[
                    0
                ] == 200
                for path in ("/models/readyz", "/models/openapi.json"):
                    assert (await ask(service, "GET", path))[0] == 200
                status, answer, _ = await ask(service, "GET", "/models/v2/models/no")
                assert (status, "there is no model" in answer["error"]) == (404, True)
                assert (await ask(service, "POST", "/models/v2/models/double/infer", {"inputs": 5}))[0] == 400
            assert served.models["double"].version is None
            assert (await ask(service, "POST", "/models/v2/models/double/infer", oip(x=X)))[0] == 503

        asyncio.run(main())

    def test_without_it_the_first_call_starts_it(self, framework):
        async def main():
            served = made()
            service = services(served, None)[framework]
            answers = [ask(service, "POST", "/models/v2/models/double/infer", oip(x=X)) for _ in range(4)]
            assert [status for status, _, _ in await asyncio.gather(*answers)] == 4 * [200]
            await served.stop()

        asyncio.run(main())

    def test_below_another_root(self, framework):
        async def main():
            served = made()
            service = services(served, served.lifespan)[framework]
            async with alive(service):
                scope = {"root_path": "/proxy", "path": "/proxy/models/v2/models/double"}
                assert (await ask(service, "GET", "/proxy/models/v2/models/double", scope=scope))[0] == 200

        asyncio.run(main())


def test_a_client_that_leaves_behind_middleware():
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.routing import Mount

    entered = asyncio.Event()

    async def wait(x):
        served.loop.call_soon_threadsafe(entered.set)
        await asyncio.sleep(30)
        return x

    async def dispatch(request, call_next):
        return await call_next(request)

    served = weft.serve.app(wait)
    service = Starlette(routes=[Mount("/m", served)], middleware=[Middleware(BaseHTTPMiddleware, dispatch=dispatch)])

    async def main():
        async def leave():
            await entered.wait()
            return {"type": "http.disconnect"}

        status, answer, _ = await ask(service, "POST", "/m/v2/models/wait/infer", oip(x=X), then=leave)
        assert (status, answer) == (499, None)
        assert served.models["wait"].statuses == {499: 1}

    asyncio.run(main())


def test_errors_in_handlers_of_ones_own():
    from fastapi import FastAPI

    service = FastAPI(exception_handlers=weft.serve.errors.handlers())
    raised = {
        "InvalidArgumentError": 400, "OutOfRangeError": 400, "QueueFullError": 429, "UnavailableError": 503,
        "DeadlineExceededError": 504, "CancelledError": 503, "UnimplementedError": 501, "FailedPreconditionError": 500,
        "NotFoundError": 500,
    }  # fmt: skip

    @service.get("/{name}")
    async def fail(name: str):
        raise getattr(weft.errors, name)("a sentence")

    async def main():
        for name, expected in raised.items():
            status, answer, headers = await ask(service, "GET", f"/{name}")
            assert (status, answer) == (expected, {"error": "a sentence"})
            assert (b"retry-after" in headers) == (status in (429, 503))
            assert getattr(weft.errors, name).http_status == expected  # one rule for all handlers

    asyncio.run(main())


def test_handlers_need_no_package_of_the_server():
    """`weft.serve.errors` is for services of one's own, which need neither msgspec nor uvicorn."""
    lines = """
        import sys
        for name in ("msgspec", "uvicorn", "httptools", "h11"):
            sys.modules[name] = None  # as if it were not installed
        import weft
        import weft.serve.errors
        from weft.serve import errors
        assert weft.serve.errors is errors
        assert weft.serve.errors.status(weft.errors.QueueFullError("full")) == 429
        assert list(weft.serve.errors.handlers()) == [weft.errors.OpError]
        try:
            weft.serve.app
        except ImportError as error:
            print(error.name)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(lines)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "msgspec\n", "")


def test_the_names_of_the_package():
    import weft.serve.application
    import weft.serve.models

    assert weft.serve.app is weft.serve.application.app
    assert weft.serve.model is weft.serve.models.model
    assert set(weft.serve.__all__) <= set(dir(weft.serve))
    with pytest.raises(AttributeError, match="nothing"):
        _ = weft.serve.nothing


def test_a_batcher_in_a_handler_of_ones_own():
    from fastapi import FastAPI

    service = FastAPI(exception_handlers=weft.serve.errors.handlers())

    @weft.batched(max_batch_size=4)
    def root(x):
        if (x < 0).any():
            raise weft.errors.InvalidArgumentError("x must not be negative")
        return np.sqrt(x)

    @service.get("/root/{x}")
    async def call(x: float):
        return {"root": (await root.aio(np.array([x]))).tolist()}

    async def main():
        answers = await asyncio.gather(*(ask(service, "GET", f"/root/{x}") for x in (4.0, -1.0, 9.0)))
        assert [(status, answer) for status, answer, _ in answers] == [
            (200, {"root": [2.0]}),
            (400, {"error": "x must not be negative"}),
            (200, {"root": [3.0]}),
        ]

    asyncio.run(main())
