"""`weft.Client`, from threads and from tasks, and NVIDIA's tritonclient against the same server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import numpy as np
import pytest
from support.callers import until
from support.libraries import need
from support.serving import need_server, serving

import weft

need_server()


def double(x, y=None):
    return {"twice": 2 * x, "both": x if y is None else x + y}


X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def served():
    with serving(weft.serve.model(double, example={"x": X[:1]})) as server:
        yield server


class TestClient:
    def test_outputs_by_name(self, served):
        with weft.Client(served.url) as client:
            outputs = client.infer("double", x=X)
            assert outputs["twice"].tolist() == (2 * X).tolist()
            assert outputs["twice"].dtype == np.float32
            assert outputs.version == "1"
            assert (
                client.infer("double", {"x": X, "y": X}, deadline=5.0, low_priority=True)["both"].tolist()
                == (2 * X).tolist()
            )
            assert client.metadata("double")["name"] == "double"
            assert client.is_ready()

    def test_an_answer_of_something_else(self):
        from weft.serve.client import _outputs
        from weft.serve.client_http import Answer

        for body in (
            b"<html>",
            b"[]",
            b"{}",
            b'{"outputs":[{}]}',
            b'{"outputs":[{"name":"y","shape":[9],"datatype":"FP32","data":[1]}]}',
            b'{"outputs":[{"name":"y","shape":[1],"datatype":"INT8","data":[1' + b"0" * 40 + b"]}]}",
            b'{"outputs":' + b"[" * 100_000,
        ):
            with pytest.raises(weft.errors.InternalError, match="Open Inference Protocol"):
                _outputs(Answer(200, {}, body))

    @pytest.mark.parametrize("body", [b"<html>", b"\xff", b"[]", b"{}", b"1", b"[" * 100_000])
    def test_other_answers_of_something_else(self, body, monkeypatch):
        from weft.serve.client import _Events
        from weft.serve.client_http import Answer

        client = weft.Client("http://127.0.0.1:1")
        monkeypatch.setattr(client, "_ask", lambda _: Answer(200, {}, body))
        with pytest.raises(weft.errors.InternalError):
            client.load("double")
        if body != b"{}":
            with pytest.raises(weft.errors.InternalError):
                client.metadata("double")
        with pytest.raises(weft.errors.InternalError):
            list(_Events().feed(b'data: {"error"' + body + b"\n\n"))

    def test_a_host_with_colons(self):
        from weft.serve.client import _Request

        assert _Request(weft.Client("http://[::1]:80"), "GET", "/").headers == [(b"host", b"[::1]:80")]

    def test_many_threads_share_one(self, served):
        with weft.Client(served.url) as client:
            seen = []

            def call(i):
                seen.append((i, client.infer("double", x=X + i)["twice"][0, 0]))

            threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert sorted(seen) == [(i, 2.0 * i) for i in range(16)]

    def test_tasks(self, served):
        async def main():
            client = weft.Client(served.url)
            asked = await asyncio.gather(*(client.aio.infer("double", x=X + i) for i in range(16)))
            assert [outputs["twice"][0, 0] for outputs in asked] == [2.0 * i for i in range(16)]
            assert await client.aio.is_ready()
            assert (await client.aio.metadata("double"))["name"] == "double"
            with pytest.raises(weft.errors.InvalidArgumentError, match="got 'z'"):
                await client.aio.infer("double", z=X)
            await client.aio.close()

        asyncio.run(main())
        asyncio.run(main())  # in another loop

    def test_errors_are_wefts(self, served):
        with weft.Client(served.url) as client:
            with pytest.raises(weft.errors.InvalidArgumentError, match="must have datatype FP32"):
                client.infer("double", x=X.astype(np.float64))
            with pytest.raises(weft.errors.NotFoundError):
                client.infer("none", x=X)
            with pytest.raises(weft.errors.InvalidArgumentError, match="one or more inputs"):
                client.infer("double")

    def test_nobody_there(self):
        with weft.Client("http://127.0.0.1:9", retries=1, timeout=5) as client:
            assert not client.is_ready()
            with pytest.raises(weft.errors.UnavailableError, match="no connection"):
                client.infer("double", x=X)

    @pytest.mark.parametrize("address", ["ftp://host", "http://host:99999", "http://", "", None, 8000])
    def test_a_wrong_address(self, address):
        with pytest.raises(weft.errors.InvalidArgumentError, match="like http"):
            weft.Client(address)

    @pytest.mark.parametrize("wrong", [{"timeout": -1}, {"timeout": None}, {"retries": -1}, {"retries": 0.5}])
    def test_wrong_options(self, wrong):
        with pytest.raises(weft.errors.InvalidArgumentError, match=f"{next(iter(wrong))} must be"):
            weft.Client(**wrong)

    def test_lists_of_numbers_are_arrays(self, served):
        with weft.Client(served.url) as client:
            with pytest.raises(weft.errors.InvalidArgumentError, match="must have datatype FP32, got FP64"):
                client.infer("double", x=X.tolist())
            outputs = client.infer("double", x=[np.float32([0, 1, 2]), np.float32([3, 4, 5])])
            assert outputs["twice"].tolist() == (2 * X).tolist()

    def test_tensors(self, served):
        need("torch")
        import torch

        x = torch.tensor(X, requires_grad=True)
        with weft.Client(served.url) as client:
            assert client.infer("double", x=x)["twice"].tolist() == (2 * X).tolist()
            assert client.infer("double", x=x.bfloat16())["twice"].tolist() == (2 * X).tolist()

    def test_wrong_inputs(self):
        client = weft.Client("http://127.0.0.1:9")
        for wrong in (object(), [[1], [1, 2]], np.array([object()]), [None], {"a": 1}):
            with pytest.raises(weft.errors.InvalidArgumentError, match="'x' must be an array, or a list of text"):
                client.infer("double", x=wrong)
            with pytest.raises(weft.errors.InvalidArgumentError, match="'x' must be an array, or a list of text"):
                next(client.stream("double", x=wrong))
        with pytest.raises(weft.errors.InvalidArgumentError, match="first dimension of rows"):
            client.infer("double", x=3.0)
        with pytest.raises(weft.errors.InvalidArgumentError, match="dict of arrays by name"):
            client.infer("double", X)
        with pytest.raises(weft.errors.InvalidArgumentError, match="deadline must be a positive"):
            client.infer("double", x=X, deadline=0)

    def test_a_server_that_answers_byte_by_byte(self):
        listener = socket.create_server(("127.0.0.1", 0))

        def answer():
            for _ in range(2):
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    for byte in b"HTTP/1.1 200 OK\r\nx: " + 1000 * b"y":
                        connection.sendall(bytes([byte]))
                        time.sleep(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with listener, weft.Client(url, timeout=0.1, retries=0) as client:
            with pytest.raises(weft.errors.DeadlineExceededError):
                client.infer("double", x=X)
            with pytest.raises(weft.errors.DeadlineExceededError):
                asyncio.run(client.aio.infer("double", x=X))
            thread.join(30)

    def test_an_idle_connection_that_the_server_closed(self):
        with (
            serving(weft.serve.model(double), limits={"keep_alive": 1}) as server,
            weft.Client(server.url, retries=0) as client,
        ):
            client.infer("double", x=X)
            (link,) = client._idle
            assert link._socket.recv(1) == b""  # the server has closed it
            assert client.infer("double", x=X)["twice"].tolist() == (2 * X).tolist()

    def test_retries_while_there_is_no_room(self):
        entered, is_open = threading.Semaphore(0), threading.Event()

        def slow(x):
            entered.release()
            assert is_open.wait(30)
            return x

        with serving(weft.serve.model(slow), limits={"calls": 1}) as server, weft.Client(server.url) as client:
            first = threading.Thread(target=client.infer, args=("slow",), kwargs={"x": X})
            first.start()
            assert entered.acquire(timeout=10)
            with weft.Client(server.url, retries=0) as impatient, pytest.raises(weft.errors.QueueFullError):
                impatient.infer("slow", x=X)
            seen = []
            second = threading.Thread(target=lambda: seen.append(client.infer("slow", x=X)["output"].tolist()))
            second.start()
            statuses = server.app.models["slow"].statuses
            until(lambda: statuses[429] >= 2)
            is_open.set()
            first.join(30)
            second.join(30)
            assert seen == [X.tolist()]


class TestTritonclient:
    @pytest.fixture
    def client(self, served):
        need("tritonclient")
        import tritonclient.http as triton

        with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
            yield client

    def test_health_and_metadata(self, client):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("double")
        assert client.is_model_ready("double", "1")
        assert not client.is_model_ready("double", "7")
        assert client.get_server_metadata()["name"] == "weft"
        assert client.get_model_metadata("double")["inputs"][0]["datatype"] == "FP32"
        assert client.get_model_config("double")["max_batch_size"] == 64
        assert client.get_model_repository_index()[0]["state"] == "READY"
        assert client.get_inference_statistics("double")["model_stats"][0]["name"] == "double"

    @pytest.mark.parametrize("binary_in", [False, True])
    @pytest.mark.parametrize("binary_out", [None, False, True])
    @pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
    def test_infer(self, client, binary_in, binary_out, compression):
        import tritonclient.http as triton

        x = triton.InferInput("x", [2, 3], "FP32")
        x.set_data_from_numpy(X, binary_data=binary_in)
        outputs = None if binary_out is None else [triton.InferRequestedOutput("twice", binary_data=binary_out)]
        found = client.infer(
            "double",
            [x],
            outputs=outputs,
            request_id="7",
            request_compression_algorithm=compression,
            timeout=5_000_000,
            priority=1,
        )
        assert found.as_numpy("twice").tolist() == (2 * X).tolist()
        assert found.get_response()["id"] == "7"

    def test_errors(self, client):
        import tritonclient.http as triton
        from tritonclient.utils import InferenceServerException

        x = triton.InferInput("x", [2, 2], "FP32")
        x.set_data_from_numpy(X[:, :2].copy())
        with pytest.raises(InferenceServerException, match="must have the shape"):
            client.infer("double", [x])
        with pytest.raises(InferenceServerException, match="no model"):
            client.get_model_metadata("none")

    def test_tasks(self, served):
        need("tritonclient")
        import tritonclient.http.aio as triton
        from tritonclient.http import InferInput

        async def main():
            async with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
                x = InferInput("x", [2, 3], "FP32")
                x.set_data_from_numpy(X)
                found = await asyncio.gather(*(client.infer("double", [x]) for _ in range(8)))
                assert all(answer.as_numpy("both").tolist() == X.tolist() for answer in found)

        asyncio.run(main())

    def test_load_and_unload(self):
        need("tritonclient")
        import tritonclient.http as triton

        model = weft.serve.model(factory=lambda: double, name="again")
        with serving(model) as server, triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            client.load_model("again")
            assert client.is_model_ready("again", "2")
            client.unload_model("again")
            assert not client.is_model_ready("again")
