"""Functions that yield, as server-sent events; coroutine functions."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from support.callers import until
from support.libraries import LIBRARIES, need, to
from support.serving import need_server, oip, serving

import weft

need_server()

STREAM = "/v2/models/count/generate_stream"


def count(x):
    if (x < 0).any():
        raise weft.errors.InvalidArgumentError("x must not be negative")
    for step in range(4):
        if (x == 13).any() and step == 2:
            raise ValueError("a secret")
        yield {"y": x + step}


@pytest.fixture(scope="module")
def served():
    with serving(weft.serve.model(count, example={"x": np.zeros((1, 1))})) as server:
        yield server


def events(text):
    return [json.loads(event.removeprefix(b"data: ")) for event in text.split(b"\n\n") if event]


def test_events(served):
    status, text, headers = served.ask("POST", STREAM, {"x": [5.0]})
    assert status == 200
    assert headers.get_content_type() == "text/event-stream"
    assert [event["outputs"][0]["data"] for event in events(text)] == [[5.0], [6.0], [7.0], [8.0]]
    assert {event["model_version"] for event in events(text)} == {"1"}
    assert events(served.ask("POST", STREAM, oip(x=np.ones((2, 1))))[1])[3]["outputs"][0]["data"] == [4.0, 4.0]


def test_the_client(served):
    with weft.Client(served.url) as client:
        assert [outputs["y"].item() for outputs in client.stream("count", x=[5.0])] == [5.0, 6.0, 7.0, 8.0]
        with pytest.raises(weft.errors.InvalidArgumentError, match="negative"):
            list(client.stream("count", x=[-1.0]))
        with pytest.raises(weft.errors.InternalError, match="ValueError"):
            list(client.stream("count", x=[13.0]))

        async def main():
            return [outputs["y"].item() async for outputs in client.aio.stream("count", x=[5.0])]

        assert asyncio.run(main()) == [5.0, 6.0, 7.0, 8.0]


def test_errors(served):
    status, answer, _ = served.ask("POST", STREAM, {"x": [-1.0]})
    assert (status, answer) == (400, {"error": "x must not be negative"})
    *first, last = events(served.ask("POST", STREAM, {"x": [13.0]})[1])
    assert len(first) == 2
    assert "ValueError" in last["error"]
    assert "secret" not in last["error"]
    assert served.ask("POST", STREAM, {"z": [1.0]})[0] == 400
    assert served.ask("POST", STREAM, b"{")[0] == 400


def test_the_other_endpoint_is_named(served):
    status, answer = served.infer("count", x=np.ones((1, 1)))
    assert (status, "generate_stream" in answer["error"]) == (400, True)
    with serving(weft.serve.model(lambda x: x, name="count")) as plain:
        assert plain.ask("POST", STREAM, {"x": [1.0]})[0] == 400


def test_a_client_that_leaves_ends_its_stream():
    step, ended = threading.Semaphore(0), threading.Event()

    def endless(x):
        try:
            while True:
                yield x
                assert step.acquire(timeout=30)
        finally:
            ended.set()

    with serving(weft.serve.model(endless, name="count")) as served:
        body = b'{"x": [1.0]}'
        leaving = served.connect()
        leaving.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (STREAM.encode(), len(body)) + body
        )
        while b"data: " not in leaving.recv(1000):
            pass
        leaving.close()

        def is_over():
            step.release()
            return ended.is_set()

        until(is_over)
        until(lambda: not served.app._open)


def test_a_stream_that_hangs_ends_with_an_error_and_is_reported():
    gate = threading.Event()

    def hanging(x):
        yield x
        assert gate.wait(30)

    with serving(weft.serve.model(hanging, name="count"), limits={"deadline": 1.0, "hang_time": 0.1}) as served:
        first, last = events(served.ask("POST", STREAM, {"x": [1.0]})[1])
        assert first["outputs"][0]["data"] == [1.0]
        assert "no further result within 1 s" in last["error"]
        until(lambda: not (served.app._open or served.app.models["count"].calls))
        until(lambda: served.ask("GET", "/v2/health/ready")[0] == 503)
        gate.set()
        until(lambda: served.ask("GET", "/v2/health/ready")[0] == 200)


def test_a_long_stream_goes_on():
    def steady(x):
        for _ in range(12):
            yield x
            threading.Event().wait(0.1)

    with serving(weft.serve.model(steady, name="count"), limits={"deadline": 1.0, "hang_time": 1.0}) as served:
        stream = served.app.models["count"]
        assert [e["outputs"][0]["data"] for e in events(served.ask("POST", STREAM, {"x": [1.0]})[1])] == 12 * [[1.0]]
        assert not stream.is_hanging
        assert stream.version.inputs[0].name == "x"  # learned


def test_streams_count_as_calls(monkeypatch):
    monkeypatch.setattr(weft.serve.errors, "RETRY_AFTER", 0)
    gate = threading.Event()

    def waiting(x):
        yield x
        assert gate.wait(30)

    with (
        serving(weft.serve.model(waiting, name="count"), limits={"calls": 1}) as served,
        weft.Client(served.url) as client,
    ):
        stream = client.stream("count", x=[1.0])
        next(stream)
        assert served.ask("POST", STREAM, {"x": [1.0]})[0] == 429

        async def patient():
            return [outputs["output"].item() async for outputs in client.aio.stream("count", x=[3.0])]

        seen = []
        others = [
            threading.Thread(target=lambda: seen.append([y["output"].item() for y in client.stream("count", x=[2.0])])),
            threading.Thread(target=lambda: seen.append(asyncio.run(patient()))),
        ]
        for other in others:
            other.start()
        until(lambda: served.app.models["count"].statuses[429] >= 4)
        gate.set()
        assert list(stream) == []
        for other in others:
            other.join(30)
        assert sorted(seen) == [[2.0], [3.0]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_functions_of_each_kind_in_each_library(library):
    need(library)

    async def later(x):
        await asyncio.sleep(0)
        return x * 2

    def chunks(x):
        yield x * 2

    async def chunks_later(x):
        yield x * 2

    example = {"x": to(library, np.ones((1, 2), np.float32))}
    models = [weft.serve.model(f, example=example) for f in (later, chunks, chunks_later)]
    with serving(*models) as served:
        assert served.infer("later", x=np.ones((1, 2), np.float32))[1]["outputs"][0]["data"] == [2.0, 2.0]
        for name in ("chunks", "chunks_later"):
            (event,) = events(served.ask("POST", f"/v2/models/{name}/generate_stream", {"x": [1.0, 1.0]})[1])
            assert event["outputs"][0]["data"] == [2.0, 2.0]


def test_outputs_that_are_asked_for():
    def two(x):
        for i in range(2):
            yield {"y": x + i, "z": -x}

    body = oip(x=np.ones((1, 2), np.float32))
    with serving(two) as served:
        path = "/v2/models/two/generate_stream"
        for event in events(served.ask("POST", path, {**body, "outputs": [{"name": "z"}]})[1]):
            assert [output["name"] for output in event["outputs"]] == ["z"]
        for wrong in (
            {**body, "outputs": [{"name": "z", "parameters": {"binary_data": True}}]},
            {**body, "parameters": {"binary_data_output": True}},
            {**body, "parameters": {"sequence_id": 3}},
            {"x": [1.0, 1.0], "sequence_id": 3},
            {"x": [1.0, 1.0], "parameters": {"sequence_end": True}},
        ):
            assert served.ask("POST", path, wrong)[0] == 400
        assert served.ask("POST", path, {"x": [1.0, 1.0], "parameters": {"mine": 3}})[0] == 200
