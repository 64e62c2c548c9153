"""The application without a network: its endpoints, its lifespan, models of several kinds."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from support.libraries import LIBRARIES, need, to
from support.serving import need_server, oip, serving

import weft

need_server()

X = np.ones((2, 3), np.float32)


async def ask(app, method, path, body=None, root=""):
    """The status and JSON of an answer, without a network."""
    sent = []
    messages = [
        {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}
    ]

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": root + path,
        "root_path": root,
        "headers": [],
        "query_string": b"",
    }
    await app(scope, receive, send)
    answer = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(answer) if answer.startswith(b"{") else answer


def negate(x):
    return -x


class TestLife:
    def test_the_first_request_starts_it(self):
        async def main():
            app = weft.serve.app(negate)
            assert (await ask(app, "GET", "/v2/health/ready"))[0] == 503
            status, answer = await ask(app, "POST", "/v2/models/negate/infer", oip(x=X), root="/models")
            assert (status, answer["outputs"][0]["data"]) == (200, [-1.0] * 6)
            assert (await ask(app, "GET", "/v2/health/ready", root="/models"))[0] == 200

        asyncio.run(main())

    def test_a_server_that_repeats_the_body_does_not_stop_the_loop(self):
        turned = threading.Event()

        def f(x):
            assert turned.wait(10)
            return x

        async def main():
            app, sent = weft.serve.app(f), []
            body = json.dumps(oip(x=X)).encode()

            async def receive():
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message):
                sent.append(message)

            asyncio.get_running_loop().call_later(0.15, turned.set)  # after the clients are watched
            await app({"type": "http", "method": "POST", "path": "/v2/models/f/infer", "headers": []}, receive, send)
            assert sent[0]["status"] == 200

        asyncio.run(main())

    def test_the_lifespan_protocol(self):
        async def main(model):
            app, sent = weft.serve.app(model), []
            messages = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]

            async def receive():
                return messages.pop()

            async def send(message):
                sent.append(message["type"])

            await app({"type": "lifespan"}, receive, send)
            return sent

        assert asyncio.run(main(negate)) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

        def fail():
            raise OSError("no weights")

        assert asyncio.run(main(weft.serve.model(factory=fail, name="broken"))) == ["lifespan.startup.failed"]

    def test_it_can_be_started_again(self):
        app = weft.serve.app(negate)

        async def main():
            async with app.lifespan():
                return (await ask(app, "POST", "/v2/models/negate/infer", oip(x=X)))[0]

        assert [asyncio.run(main()), asyncio.run(main())] == [200, 200]

    def test_a_load_that_hangs_does_not_keep_it_from_ending(self):
        entered, go_on = threading.Event(), threading.Event()

        def make():
            entered.set()
            go_on.wait(30)
            return negate

        async def main():
            model = weft.serve.model(factory=make, name="slow")
            loading = asyncio.ensure_future(model.load())
            while not entered.is_set():
                await asyncio.sleep(0.001)
            await asyncio.wait_for(weft.serve.app(model, limits=weft.serve.Limits(drain_time=0.01)).stop(), 10)
            return loading

        assert asyncio.run(main()).cancelled()
        go_on.set()

    def test_wrong_tls_files(self):
        from weft.serve.server import make

        for files in ({"certificate": "none.pem"}, {"key": "none.key"}):
            with pytest.raises(weft.errors.InvalidArgumentError, match=r"none\.(pem|key)"):
                make(weft.serve.app(negate), **files)


class TestModels:
    @pytest.mark.parametrize("library", LIBRARIES)
    def test_a_function_gets_the_arrays_of_its_library(self, library):
        need(library)
        seen = []

        def f(x):
            seen.append(type(x).__module__.partition(".")[0])
            return {"y": x * 2, "n": x.sum(1)}

        with serving(weft.serve.model(f, example={"x": to(library, X)})) as served:
            status, answer = served.infer("f", x=X)
            assert status == 200
            assert answer["outputs"][0]["data"] == [2.0] * 6
        assert set(seen) <= {library, "jaxlib"}

    def test_a_module_of_torch(self):
        need("torch")
        import torch

        with serving(weft.serve.model(torch.nn.Linear(3, 1), name="net", max_batch_size=4)) as served:
            assert served.infer("net", input=X)[1]["outputs"][0]["shape"] == [2, 1]

    def test_a_batcher_is_used_itself(self):
        policy = weft.batched(negate, max_batch_size=7)
        with serving(policy) as served:
            assert served.infer("negate", x=X)[0] == 200
            assert served.app.models["negate"].version.policy is policy
            assert policy.statistics().calls == 1
        assert policy(X).tolist() == (-X).tolist()  # it is not closed with the server

    def test_the_wire_has_rows_where_callers_have_none(self):
        @weft.batched(rows=False, max_batch_size=4)
        def total(x):
            assert x.ndim == 2
            return x.sum(axis=1)

        with serving(total) as served:
            assert served.infer("total", x=X)[1]["outputs"][0]["data"] == [3.0, 3.0]

    def test_padding_is_not_seen(self):
        def f(x, real):
            assert len(x) == 4
            return np.where(real[:, None], x, np.nan)

        options = {"allowed_batch_sizes": [4], "max_batch_size": 4, "pass_mask": "real"}
        with serving(weft.serve.model(f, example={"x": X}, **options)) as served:
            assert served.infer("f", x=X)[1]["outputs"][0]["data"] == [1.0] * 6
            assert served.ask("GET", "/v2/models/f")[1]["inputs"] == [
                {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
            ]

    def test_what_cannot_be_served_is_refused(self):
        refused = weft.errors.InvalidArgumentError
        with pytest.raises(refused, match="both or neither"):
            weft.serve.model()
        with pytest.raises(refused, match="two models"):
            weft.serve.app(negate, negate)
        with pytest.raises(refused, match="letters"):
            weft.serve.model(lambda x: x)
        with pytest.raises(refused, match="none"):
            weft.serve.app()
        for limits in ({"rows": 0}, {"body_bytes": 1e6}, {"deadline": float("nan")}):
            with pytest.raises(refused, match="positive"):
                weft.serve.Limits(**limits)
        with pytest.raises(refused, match="token"):
            weft.serve.app(negate, token=" ")
        with pytest.raises(refused, match="all, errors, none"):
            weft.serve.app(negate, access_log="some")
        for wrong in ({"max_batchsize": 3}, {"max_batch_size": 0}, {"example": X}, {"library": "tensorflow"}):
            with pytest.raises(refused, match=f"{min(wrong)}|max_batch_size"):
                weft.serve.model(negate, **wrong)
        for example, sentence in [
            ({"z": X}, "got 'z'"),
            ({"x": 5}, "one or more rows"),
            ({"x": X[:0]}, "one or more rows"),
        ]:
            with pytest.raises(weft.errors.FailedPreconditionError, match=sentence):
                asyncio.run(weft.serve.model(negate, example=example).load())

    def test_weights_are_warm_before_the_model_is_ready(self):
        sizes = []

        def f(x):
            sizes.append(len(x))
            return x

        model = weft.serve.model(f, example={"x": X[:1]}, allowed_batch_sizes=[1, 8, 16], max_batch_size=16)
        asyncio.run(model.load())
        assert sizes == [1, 8, 16]
