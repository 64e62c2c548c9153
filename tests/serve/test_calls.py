"""Calls over real HTTP: the Open Inference Protocol and TensorFlow Serving's REST API, right and wrong."""

from __future__ import annotations

import base64
import gzip
import io
import json
import struct

import numpy as np
import pytest
from support.callers import until
from support.serving import need_server, oip, serving

import weft

need_server()

from weft.serve.dtypes import DTYPES  # noqa: E402


def affine(x, offset=None):
    if (x == 666).any():
        raise ValueError("a secret")
    if (x == 667).any():
        raise weft.errors.InvalidArgumentError("667 is not allowed")
    return {"y": 2 * x, "sum": x.sum(axis=1) + (0 if offset is None else offset[:, 0])}


def short(x):
    with np.errstate(divide="ignore"):
        return x[:1] if (x < 0).any() else np.log(x)


@pytest.fixture(scope="module")
def served():
    example = {"x": np.zeros((1, 3), np.float32)}
    pair = weft.serve.model(lambda a, b: (a + b, a - b), name="pair")
    log = weft.serve.model(short, refuse_nan=True)
    with serving(weft.serve.model(affine, example=example), pair, log, limits={"rows": 1000, "rank": 4}) as server:
        yield server


X = np.arange(6, dtype=np.float32).reshape(2, 3)


class TestOpenInferenceProtocol:
    def test_a_call(self, served):
        status, answer = served.infer("affine", x=X)
        assert status == 200
        assert (answer["model_name"], answer["model_version"]) == ("affine", "1")
        y, total = answer["outputs"]
        assert y == {"name": "y", "datatype": "FP32", "shape": [2, 3], "data": (2 * X).ravel().tolist()}
        assert total == {"name": "sum", "datatype": "FP32", "shape": [2], "data": [3.0, 12.0]}

    def test_nested_data_id_and_chosen_outputs(self, served):
        request = oip(x=X) | {"id": "seven", "outputs": [{"name": "sum"}]}
        request["inputs"][0]["data"] = X.tolist()
        answer = served.ask("POST", "/v2/models/affine/infer", request)[1]
        assert answer["id"] == "seven"
        assert [output["name"] for output in answer["outputs"]] == ["sum"]

    def test_optional_inputs(self, served):
        answer = served.infer("affine", offset=np.ones((2, 1), np.float32), x=X)[1]
        assert answer["outputs"][1]["data"] == [4.0, 13.0]

    def test_tuples_have_numbers(self, served):
        answer = served.infer("pair", b=X, a=X)[1]
        assert {output["name"]: output["data"][-1] for output in answer["outputs"]} == {
            "output_0": 10.0,
            "output_1": 0.0,
        }

    def test_binary_in_and_out(self, served):
        raw = X.tobytes()
        head = {
            "inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}]
        }
        head["outputs"] = [{"name": "y", "parameters": {"binary_data": True}}, {"name": "sum"}]
        text = json.dumps(head).encode()
        length = {"Inference-Header-Content-Length": str(len(text))}
        status, answer, headers = served.ask("POST", "/v2/models/affine/infer", text + raw, length)
        assert status == 200
        size = int(headers["Inference-Header-Content-Length"])
        assert np.frombuffer(answer[size:], np.float32).tolist() == (2 * X).ravel().tolist()
        assert json.loads(answer[:size])["outputs"][1]["data"] == [3.0, 12.0]

    def test_a_compressed_body(self, served):
        body = gzip.compress(json.dumps(oip(x=X)).encode())
        assert served.ask("POST", "/v2/models/affine/infer", body, {"Content-Encoding": "gzip"})[0] == 200

    def test_many_rows_are_split(self, served):
        x = np.random.default_rng(0).random((300, 3), np.float32)
        assert served.infer("affine", x=x)[1]["outputs"][0]["data"] == (2 * x).ravel().tolist()

    @pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
    def test_every_datatype(self, served, dtype):
        x = np.array([[3, 5]], dtype)
        status, answer = served.infer("pair", a=x, b=np.ones_like(x))
        assert status == 200, answer
        assert answer["outputs"][0] == oip(output_0=x + 1)["inputs"][0]
        assert answer["outputs"][1] == oip(output_1=x - 1)["inputs"][0]

    def test_nan_has_no_json(self, served):
        status, answer = served.infer("short", x=np.zeros((1,), np.float32))
        assert status == 500
        assert "binary" in answer["error"]


REGION = {"shared_memory_region": "region", "shared_memory_byte_size": 24, "shared_memory_offset": 0}


def wrong_requests():
    x = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [0] * 6}

    def with_(**changes):
        return {"inputs": [{**x, **changes}]}

    return {
        "no JSON": (b"{", "JSON"),
        "no object": (b"[]", "JSON"),
        "too deep": (b"[" * 100_000, "JSON"),
        "not UTF-8": (b'{"inputs": "\xff"}', "JSON"),
        "no inputs": ({"inputs": []}, "1 to 64 inputs"),
        "another name": (with_(name="z"), "got 'z'"),
        "twice": ({"inputs": [x, x]}, "given once"),
        "missing": ({"inputs": [{**x, "name": "offset"}]}, "'x' is missing"),
        "another dtype": (with_(datatype="FP64"), "FP32, got FP64"),
        "unknown dtype": (with_(datatype="FP99"), "FP32, got FP99"),
        "another shape": (with_(shape=[3, 2]), "must have the shape [-1, 3]"),
        "no rows": (with_(shape=[]), "1 to 4 lengths"),
        "negative rows": (with_(shape=[-2, 3]), "from 0 to"),
        "rank": (with_(shape=[1] * 9), "1 to 4 lengths"),
        "huge rows": (with_(shape=[1 << 47, 3]), "at most 1000 rows"),
        "huge shape": (with_(shape=[2, 1 << 47]), "must have the shape"),
        "huger shape": (with_(shape=[2, 1 << 62]), "2**48"),
        "beyond 64 bits": (with_(shape=[10**20, 3]), "2**48"),
        "beyond numbers": (json.dumps(with_(shape=[7, 3])).encode().replace(b"7", b"1" + b"0" * 5000), ""),
        "too few": (with_(data=[0] * 5), "shape [2, 3]"),
        "ragged": (with_(data=[[0, 0, 0], [0, 0]]), "shape [2, 3]"),
        "wrong depth": (with_(data=[[[0] * 6]]), "nested 2 deep"),
        "text": (with_(data=["1"] * 6), "must be FP32"),
        "NaN": (json.dumps(with_(data=[float("nan")] * 6)).encode(), "JSON"),
        "out of range": (with_(data=[1e300] * 6), "too large"),
        "no data": (with_(data=None), "must be FP32"),
        "binary that is not there": (with_(data=None) | {}, "must be FP32"),
        "output": ({**with_(), "outputs": [{"name": "w"}]}, "got 'w'"),
        "timeout": ({**with_(), "parameters": {"timeout": "soon"}}, "microseconds"),
        "priority": ({**with_(), "parameters": {"priority": -1}}, "priority"),
        "of the model": (with_(data=[667] * 6), "667 is not allowed"),
        "shared memory of an input": (with_(parameters=REGION), "shared memory"),
        "shared memory of an input with data": (with_(parameters={**REGION, "binary_data_size": 0}), "shared memory"),
        "shared memory of an output": ({**with_(), "outputs": [{"name": "y", "parameters": REGION}]}, "shared memory"),
        "classes": ({**with_(), "outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "classification"),
        "a sequence": ({**with_(), "parameters": {"sequence_id": 7}}, "sequence_id is not supported"),
        "a named sequence": ({**with_(), "parameters": {"sequence_id": "a"}}, "sequence_id is not supported"),
        "the start of a sequence": ({**with_(), "parameters": {"sequence_start": True}}, "sequence_start"),
        "the end of a sequence": ({**with_(), "parameters": {"sequence_id": 0, "sequence_end": True}}, "sequence_end"),
        "no flag": ({**with_(), "parameters": {"binary_data_output": "yes"}}, "true or false"),
        "no flag of an output": (
            {**with_(), "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
            "true or false",
        ),
        "1e39": (json.dumps(with_()).replace("0, 0", "0, 1e39").encode(), "must be FP32"),
        "1e400": (json.dumps(with_()).replace("0, 0", "0, 1e400").encode(), "must be FP32"),
        "-1e400": (json.dumps(with_()).replace("0, 0", "0, -1e400").encode(), "must be FP32"),
        "many more numbers": (json.dumps(with_(data=[0] * 600_000)).encode(), "more than 6 numbers"),
    }


class TestRefused:
    @pytest.mark.parametrize("name", wrong_requests())
    def test_a_wrong_request_is_told_so(self, served, name):
        body, sentence = wrong_requests()[name]
        status, answer, _ = served.ask("POST", "/v2/models/affine/infer", body)
        assert status == 400
        assert sentence in answer["error"]
        assert "Traceback" not in answer["error"]

    @pytest.mark.parametrize(
        "parameters", [{"sequence_id": 0}, {"sequence_id": "", "sequence_start": False}, {"mine": 3}, {}]
    )
    def test_parameters_that_ask_for_nothing(self, served, parameters):
        assert served.ask("POST", "/v2/models/affine/infer", oip(x=X) | {"parameters": parameters})[0] == 200

    @pytest.mark.parametrize("rows", [1001, 5000])
    def test_more_rows_than_a_call_may_have(self, served, rows):
        x = np.zeros((rows, 3), np.float32)
        for path, body in (
            ("/v2/models/affine/infer", oip(x=x)),
            ("/v1/models/affine:predict", {"inputs": x.tolist()}),
            ("/v1/models/affine:predict", {"instances": x.tolist()}),
        ):
            status, answer, headers = served.ask("POST", path, body)
            assert (status, "at most 1000 rows" in answer["error"]) == (413, True)
            assert "retry-after" not in headers
        assert served.infer("affine", x=x[:1000])[0] == 200

    @pytest.mark.parametrize("size", [0, 1, 23, 25, 1 << 40, -1, "24", True, 24.0])
    def test_binary_data_of_another_size(self, served, size):
        head = {
            "inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": size}}]
        }
        text = json.dumps(head).encode()
        body = text + X.tobytes()
        status, answer, _ = served.ask(
            "POST", "/v2/models/affine/infer", body, {"Inference-Header-Content-Length": str(len(text))}
        )
        assert status == 400, answer

    @pytest.mark.parametrize("length", ["0", "-1", "99999", "x", "9" * 40, ""])
    def test_a_wrong_header_length(self, served, length):
        status, answer, _ = served.ask(
            "POST", "/v2/models/affine/infer", oip(x=X), {"Inference-Header-Content-Length": length}
        )
        assert status == 400
        assert "Inference-Header-Content-Length" in answer["error"] or "JSON" in answer["error"]

    def test_bytes_after_the_last_input(self, served):
        text = json.dumps(oip(x=X)).encode()
        body = text + b"more"
        status, answer, _ = served.ask(
            "POST", "/v2/models/affine/infer", body, {"Inference-Header-Content-Length": str(len(text))}
        )
        assert (status, answer["error"]) == (400, "the body has 4 bytes after its last input")

    def test_nan_where_it_is_refused(self, served):
        raw = struct.pack("<f", float("nan"))
        head = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}]}
        text = json.dumps(head).encode()
        length = {"Inference-Header-Content-Length": str(len(text))}
        status, answer, _ = served.ask("POST", "/v2/models/short/infer", text + raw, length)
        assert (status, answer["error"]) == (400, "input 'x' must not have NaN or infinite values")

    def test_an_error_of_the_model_says_no_more_than_its_class(self, served):
        status, answer = served.infer("affine", x=np.full((1, 3), 666, np.float32))
        assert status == 500
        assert "ValueError" in answer["error"]
        assert "secret" not in answer["error"]

    def test_a_wrong_number_of_rows_is_the_models_fault(self, served):
        status, answer = served.infer("short", x=-np.ones(2, np.float32))
        assert status == 500
        assert "rows of its batch" in answer["error"]

    def test_unknown_paths_models_versions_and_methods(self, served):
        assert served.ask("GET", "/v2/models/none")[0] == 404
        assert served.ask("GET", "/nothing")[0] == 404
        assert served.ask("POST", "/v2/models/affine/versions/2/infer", oip(x=X))[0] == 404
        assert served.ask("POST", "/v2/models/affine/versions/1/infer", oip(x=X))[0] == 200
        status, _, headers = served.ask("GET", "/v2/models/affine/infer")
        assert (status, headers["allow"]) == (405, "POST")
        assert served.ask("PUT", "/v2/models/affine/infer", b"{}")[0] == 405

    @pytest.mark.parametrize(
        ("encoding", "body", "status"),
        [
            ("gzip", b"nonsense", 400),
            ("br", b"x", 415),
            ("gzip", gzip.compress(b"{}", mtime=0)[:-4], 400),
            ("deflate", b"", 400),
        ],
    )
    def test_compressed_nonsense(self, served, encoding, body, status):
        assert served.ask("POST", "/v2/models/affine/infer", body, {"Content-Encoding": encoding})[0] == status


class TestNumbers:
    """A number that has no form in its datatype is refused, whatever its form is in the request."""

    @pytest.fixture(scope="class", params=["FP16", "BF16", "FP32", "FP64"])
    @classmethod
    def typed(cls, request):
        dtype = DTYPES.get(request.param)
        if dtype is None:
            pytest.skip("ml_dtypes is not installed")
        model = weft.serve.model(lambda x: x.astype(np.float64), name="f", example={"x": np.zeros((1,), dtype)})
        with serving(model) as served:
            yield served, request.param

    @pytest.mark.parametrize("count", [1, 2000])
    @pytest.mark.parametrize("number", ["1e400", "-1e400", "1e309", "1" + "0" * 400, "1e4000000000000"])
    def test_beyond_all(self, typed, number, count):
        served, datatype = typed
        data = ", ".join([number] * count)
        entry = f'{{"name": "x", "shape": [{count}], "datatype": "{datatype}", "data": [{data}]}}'
        for path, body in (
            ("/v2/models/f/infer", f'{{"inputs": [{entry}]}}'),
            ("/v1/models/f:predict", f'{{"inputs": [{data}]}}'),
            ("/v1/models/f:predict", f'{{"instances": [{data}]}}'),
        ):
            assert served.ask("POST", path, body.encode())[0] == 400, path

    @pytest.mark.parametrize("count", [1, 2000])
    @pytest.mark.parametrize("number", ["1e39", "-1e39", "1" + "0" * 39])
    def test_beyond_32_bits(self, typed, number, count):
        served, datatype = typed
        data = ", ".join([number] * count)
        entry = f'{{"name": "x", "shape": [{count}], "datatype": "{datatype}", "data": [{data}]}}'
        status = 200 if datatype == "FP64" else 400
        assert served.ask("POST", "/v2/models/f/infer", f'{{"inputs": [{entry}]}}'.encode())[0] == status
        assert served.ask("POST", "/v1/models/f:predict", f'{{"inputs": [{data}]}}'.encode())[0] == status

    def test_infinity_by_its_name(self, typed):
        served, _ = typed
        assert served.ask("POST", "/v1/models/f:predict", b'{"inputs": [Infinity, 1.0]}')[0] == 200
        assert served.ask("POST", "/v1/models/f:predict", b'{"inputs": [3.4028235e38]}')[0] == (
            200 if typed[1] in ("FP32", "FP64") else 400
        )


class TestTensorFlowServing:
    def predict(self, served, model, body):
        status, answer, _ = served.ask("POST", f"/v1/models/{model}:predict", body)
        return status, answer

    def test_rows(self, served):
        status, answer = self.predict(served, "affine", {"instances": [{"x": row} for row in X.tolist()]})
        assert status == 200
        assert answer["predictions"] == [{"y": [0, 2, 4], "sum": 3}, {"y": [6, 8, 10], "sum": 12}]
        assert self.predict(served, "affine", {"instances": X.tolist()}) == (status, answer)

    def test_columns(self, served):
        wanted = {"outputs": {"y": (2 * X).tolist(), "sum": [3, 12]}}
        assert self.predict(served, "affine", {"inputs": X.tolist()}) == (200, wanted)
        assert self.predict(served, "affine", {"inputs": {"x": X.tolist()}, "signature_name": "serving_default"}) == (
            200,
            wanted,
        )

    def test_a_single_output_loses_its_name(self, served):
        assert self.predict(served, "short", {"instances": [1.0, 1.0]}) == (200, {"predictions": [0.0, 0.0]})
        assert self.predict(served, "short", {"inputs": [1.0]}) == (200, {"outputs": [0.0]})

    def test_infinity_is_written_as_tensorflow_serving_does(self, served):
        status, answer, _ = served.ask("POST", "/v1/models/short:predict", {"instances": [0.0]})
        assert (status, answer) == (200, {"predictions": [-np.inf]})

    @pytest.mark.parametrize(
        ("body", "sentence"),
        [
            ({"instances": [[0, 0, 0]], "inputs": [[0, 0, 0]]}, "either"),
            ({}, "either"),
            ([], "either"),
            ({"instances": []}, "one or more rows"),
            ({"instances": [{"x": [0, 0, 0]}, {"z": 1}]}, "row 1 has not"),
            ({"instances": [[0, 0]]}, "shape"),
            ({"instances": [[0, 0, 0], [0, 0]]}, "must be FP32: its rows differ in length"),
            ({"instances": ["text"]}, "must be FP32"),
            ({"instances": [[1e300] * 3]}, "must be FP32"),
            ({"instances": [[True] * 3]}, "must be FP32"),
            ({"inputs": 5}, "list"),
            ({"inputs": {"z": [1]}}, "got 'z'"),
            ({"instances": [[0, 0, 0]], "signature_name": "other"}, "serving_default"),
            (b"{", "JSON"),
        ],
    )
    def test_a_wrong_request_is_told_so(self, served, body, sentence):
        status, answer = self.predict(served, "affine", body)
        assert status == 400
        assert sentence in answer["error"]

    def test_status_and_metadata(self, served):
        (seen,) = served.ask("GET", "/v1/models/affine")[1]["model_version_status"]
        assert (seen["state"], seen["version"]) == ("AVAILABLE", "1")
        assert served.ask("GET", "/v1/models/affine/versions/1")[0] == 200
        assert served.ask("GET", "/v1/models/affine/versions/2")[0] == 404
        told = served.ask("GET", "/v1/models/affine/metadata")[1]
        (x,) = told["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"].values()
        assert x["dtype"] == "DT_FLOAT"
        assert [dim["size"] for dim in x["tensor_shape"]["dim"]] == ["-1", "3"]


class TestAround:
    def test_metadata_config_and_statistics(self, served):
        served.infer("affine", x=X)
        told = served.ask("GET", "/v2/models/affine")[1]
        assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
        assert [output["name"] for output in told["outputs"]] == ["y", "sum"]
        assert served.ask("GET", "/v2/models/affine/config")[1]["max_batch_size"] == 64
        assert (
            served.ask("GET", "/v2/models/affine/stats")[1]["model_stats"][0]["inference_stats"]["success"]["count"] > 0
        )
        assert len(served.ask("GET", "/v2/models/stats")[1]["model_stats"]) == 3
        assert {entry["state"] for entry in served.ask("POST", "/v2/repository/index")[1]} == {"READY"}
        server = served.ask("GET", "/v2")[1]
        assert server["name"] == "weft"
        assert server["extensions"] == ["binary_tensor_data", "model_repository", "model_configuration", "statistics"]

    def test_health(self, served):
        for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/affine/ready"):
            assert served.ask("GET", path)[0] == 200
        assert served.ask("HEAD", "/healthz")[0] == 200

    def test_inputs_are_learned_from_the_first_call(self):
        with serving(weft.serve.model(lambda x: x, name="any")) as server:
            assert server.ask("GET", "/v2/models/any")[1]["inputs"] == []
            assert server.infer("any", x=np.ones((1, 2), np.int32))[0] == 200
            assert server.ask("GET", "/v2/models/any")[1]["inputs"] == [
                {"name": "x", "datatype": "INT32", "shape": [-1, 2]}
            ]
            assert server.infer("any", x=np.ones((1, 5), np.int32))[0] == 200

    def test_traceparent_comes_back(self, served):
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        _, _, headers = served.ask("POST", "/v2/models/affine/infer", oip(x=X), {"traceparent": trace})
        assert headers["traceparent"] == trace
        assert headers["weft-model-version"] == "1"
        assert "traceparent" not in served.ask("GET", "/healthz", None, {"traceparent": "nonsense"})[2]

    def test_metrics_can_be_parsed(self, served):
        served.infer("affine", x=X)
        text = served.ask("GET", "/metrics")[1].decode()
        samples = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        assert samples['weft_ready{model="affine"}'] == 1
        assert samples['weft_responses_total{model="affine",status="200"}'] > 0
        assert (
            samples['weft_batch_rows_bucket{model="affine",le="+Inf"}'] == samples['weft_batches_total{model="affine"}']
        )

    def test_base64_text(self):
        decoded = weft.serve.model(lambda x: x, name="t")
        assert decoded.name == "t"
        from weft.serve.tfs import _text

        assert _text("x", {"b64": base64.b64encode("ä".encode()).decode()}) == "ä"
        with pytest.raises(weft.errors.InvalidArgumentError, match="base64"):
            _text("x", {"b64": "!"})

    def test_the_access_log(self):
        with serving(weft.serve.model(lambda x: x, name="any"), access_log="all") as server:
            server.app.access._stream = log = io.StringIO()
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            server.ask("POST", "/v2/models/any/infer", oip(x=X), {"traceparent": trace})
            server.ask("GET", "/nothing")
            until(lambda: log.getvalue().count("\n") == 2)
        call, missing = map(json.loads, log.getvalue().splitlines())
        assert (call["status"], call["model"], call["version"], call["rows"]) == (200, "any", 1, 2)
        assert (call["trace_id"], call["parent_id"]) == (trace[3:35], trace[36:52])
        assert (missing["status"], "/nothing" in missing["error"]) == (404, True)
