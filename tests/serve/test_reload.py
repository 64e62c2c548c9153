"""Versions: hot reload without a lost request, unload, failures, and who may ask for them."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from support.serving import need_server, oip, serving

import weft

need_server()

X = np.ones((1, 2), np.float32)
LOAD, UNLOAD = "/v2/repository/models/scaled/load", "/v2/repository/models/scaled/unload"


def scaled():
    """A model whose every version multiplies by its own number."""
    numbers = itertools.count(1)

    def make():
        number = next(numbers)
        return lambda x: number * x

    return weft.serve.model(factory=make, name="scaled", example={"x": X}, max_batch_size=8)


def test_no_request_is_lost_and_every_answer_says_its_version():
    with serving(scaled()) as served, weft.Client(served.url, retries=0) as client:
        stop, seen, errors = threading.Event(), [], []

        def call():
            try:
                while not stop.is_set():
                    outputs = client.infer("scaled", x=X)
                    seen.append((int(outputs.version), float(outputs["output"][0, 0])))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        versions = [client.load("scaled") for _ in range(10)]
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not errors
        assert versions == [str(number) for number in range(2, 12)]
        assert all(version == factor for version, factor in seen)
        assert len({version for version, _ in seen}) > 1
        served.infer("scaled", x=X)
        assert served.app.models["scaled"].statuses.keys() == {200}


@pytest.mark.parametrize("problem", [OSError, SystemExit])
def test_a_version_that_fails_leaves_the_old_one(problem):
    numbers = itertools.count(1)

    def make():
        if next(numbers) > 1:
            raise problem("no weights")
        return lambda x: x

    with serving(weft.serve.model(factory=make, name="scaled")) as served:
        status, answer, _ = served.ask("POST", LOAD, b"{}")
        assert status == 500
        assert "no weights" in answer["error"]
        assert served.infer("scaled", x=X)[1]["model_version"] == "1"


def test_a_plain_function_cannot_be_loaded_again():
    with serving(weft.serve.model(lambda x: x, name="scaled")) as served:
        assert "factory" in served.ask("POST", LOAD, b"{}")[1]["error"]


def test_unload_and_load():
    with serving(scaled()) as served:
        assert served.ask("POST", UNLOAD, b"{}")[0] == 200
        status, _, headers = served.ask("POST", "/v2/models/scaled/infer", oip(x=X))
        assert (status, headers["retry-after"]) == (503, "1")
        assert served.ask("GET", "/v2/health/ready")[0] == 503
        assert served.ask("POST", LOAD, b"{}")[0] == 200
        assert served.infer("scaled", x=X)[1]["model_version"] == "2"


def test_reload_of_all():
    with serving(scaled()) as served:
        served.run(served.app.reload())
        assert served.infer("scaled", x=X)[1]["model_version"] == "2"


class TestGuard:
    @pytest.mark.parametrize(
        "headers",
        [
            {"Host": "evil.example"},
            {"Host": "localhost@evil.example"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Host": "[::1"},
        ],
    )
    def test_foreign_pages_change_nothing(self, headers):
        with serving(scaled()) as served:
            assert served.ask("POST", LOAD, b"{}", headers)[0] == 403
            assert served.ask("POST", "/ui/models/scaled/options", {"max_batch_size": 1}, headers)[0] == 403
            assert served.app.models["scaled"].version.number == 1

    def test_the_own_page_may(self):
        with serving(scaled()) as served:
            host = f"localhost:{served.port}"
            assert served.ask("POST", LOAD, b"{}", {"Host": host, "Origin": f"http://{host}"})[0] == 200

    def test_without_a_token_other_machines_may_not(self):
        from weft.serve.errors import HttpError
        from weft.serve.guard import Guard
        from weft.serve.http import Exchange

        scope = {"method": "POST", "path": LOAD, "headers": [(b"host", b"localhost")], "client": ("10.0.0.9", 1)}
        with pytest.raises(HttpError, match="this machine alone"):
            Guard().check_change(Exchange(scope, None))
        for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
            Guard().check_change(Exchange(scope | {"client": (address, 1)}, None))
        Guard("secret").check_change(Exchange(scope, None))
        with pytest.raises(HttpError, match="Host"):
            Guard("secret", ["model.example"]).check_change(Exchange(scope, None))

    def test_a_token(self):
        with serving(scaled(), token="secret") as served:
            for given in (None, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                status, _, headers = served.ask("POST", "/v2/models/scaled/infer", oip(x=X), given)
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
            for path in ("/healthz", "/v2/health/ready", "/"):
                assert served.ask("GET", path)[0] == 200
            assert served.ask("GET", "/metrics")[0] == 401
            with weft.Client(served.url, token="secret") as client:
                assert client.infer("scaled", x=X)["output"].tolist() == [[1.0, 1.0]]
                assert client.load("scaled") == "2"
            with (
                weft.Client(served.url) as client,
                pytest.raises(weft.errors.FailedPreconditionError, match="token"),
            ):
                client.infer("scaled", x=X)


class TestOptions:
    def test_they_act_at_once(self):
        with serving(scaled()) as served:
            status, changed, _ = served.ask(
                "POST", "/ui/models/scaled/options", {"max_batch_size": 2, "max_wait": 0.01}
            )
            assert status == 200
            assert (changed["max_batch_size"], changed["max_wait"]) == (2, 0.01)
            assert served.app.models["scaled"].version.policy.options.max_batch_size == 2

    @pytest.mark.parametrize(
        "body", [b"[]", b"{", {"max_batch_size": 0}, {"max_batch_size": "all"}, {"rows": False}, {"max_wait": -1}]
    )
    def test_wrong_ones_change_nothing(self, body):
        with serving(scaled()) as served:
            status, answer, _ = served.ask("POST", "/ui/models/scaled/options", body)
            assert status == 400, answer
            assert served.app.models["scaled"].version.policy.options.max_batch_size == 8


class TestBodies:
    """What is asked for beside a load and is not supported is refused: an answer would say that it was done."""

    @pytest.mark.parametrize(
        "body",
        [
            {"parameters": {"config": "{}"}}, {"parameters": {"file:1/model.py": "cHJpbnQoKQ=="}}, {"config": {}},
            {"parameters": {"config": "{}", "file:1/model.onnx": ""}}, {"parameters": {"unload_dependents": False}},
            {"parameters": 5}, b"[]", b"{", b"\xff", b'{"parameters": {"\xc3\xa4": 1}}',
        ],
    )  # fmt: skip
    def test_of_a_load(self, body):
        with serving(scaled()) as served:
            status, answer, _ = served.ask("POST", LOAD, body)
            assert status == 400, answer
            assert served.app.models["scaled"].version.number == 1

    @pytest.mark.parametrize("body", [None, b"", {}, {"parameters": {}}, {"parameters": None}])
    def test_of_a_load_that_asks_for_nothing_else(self, body):
        with serving(scaled()) as served:
            assert served.ask("POST", LOAD, body)[0] == 200

    def test_of_an_unload(self):
        with serving(scaled()) as served:
            for wrong in ({"parameters": {"unload_dependents": "no"}}, {"parameters": {"force": True}}):
                assert served.ask("POST", UNLOAD, wrong)[0] == 400
            assert served.app.models["scaled"].is_ready
            assert served.ask("POST", UNLOAD, {"parameters": {"unload_dependents": True}})[0] == 200

    def test_of_the_index(self):
        with serving(scaled(), weft.serve.model(lambda x: x, name="other")) as served:
            assert served.ask("POST", UNLOAD)[0] == 200
            for body, names in (
                (None, {"scaled", "other"}),
                ({"ready": False}, {"scaled", "other"}),
                ({"ready": True}, {"other"}),
            ):
                assert {x["name"] for x in served.ask("POST", "/v2/repository/index", body)[1]} == names
            for wrong in ({"ready": 1}, {"labels": True}, b"["):
                assert served.ask("POST", "/v2/repository/index", wrong)[0] == 400
