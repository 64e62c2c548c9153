"""The wire alone, with Hypothesis: what is encoded is decoded again, and no bytes do more than be refused."""

from __future__ import annotations

import json

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.serving import need_server

import weft

need_server()

from weft.core.small import no_rows, rows_alike  # noqa: E402
from weft.serve import oip, tfs  # noqa: E402
from weft.serve.dtypes import DATATYPES, DTYPES  # noqa: E402
from weft.serve.limits import Limits  # noqa: E402
from weft.serve.signature import Parameters, tensors_of  # noqa: E402

LIMITS = Limits(rows=100, rank=4)
PARAMETERS = Parameters(lambda x, text=None: x)

plain = st.sampled_from([dtype for name, dtype in DTYPES.items() if name != "BF16"])
tensors = plain.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=4, max_side=4)))


@given(tensors, st.text(max_size=5), st.booleans())
def test_what_is_sent_comes_back(x, id, binary_out):
    headers, body = oip.encode_request({"x": x, "text": ["ä"] * len(x)}, id, {"binary_data_output": binary_out})
    call = oip.decode(body, dict(headers)[b"inference-header-content-length"], None, PARAMETERS, LIMITS)
    assert call.values["x"].dtype == x.dtype
    np.testing.assert_array_equal(call.values["x"], x)
    assert call.values["text"] == ["ä"] * len(x)
    assert call.values["x"].flags.writeable
    is_finite = x.dtype.kind != "f" or np.isfinite(x).all()
    if not (binary_out or is_finite):
        with pytest.raises(weft.errors.FailedPreconditionError, match="NaN or infinite"):
            oip.encode(call, {"y": x, "text": ["ö"] * len(x)}, "m", "1")
        return
    headers, body = oip.encode(call, {"y": x, "text": ["ö"] * len(x)}, "m", "1")
    outputs, head = oip.decode_answer(body, dict(headers).get(b"inference-header-content-length"))
    np.testing.assert_array_equal(outputs["y"], x)
    assert outputs["y"].dtype == x.dtype
    assert outputs["text"] == ["ö"] * len(x)
    assert head.get("id", "") == id


@given(tensors, st.booleans())
def test_numbers_in_json_come_as_they_are(x, is_nested):
    assume(x.dtype.kind != "f" or (x.dtype.itemsize > 2 and np.isfinite(x).all()))
    entry = {
        "name": "x",
        "shape": x.shape,
        "datatype": DATATYPES[x.dtype],
        "data": (x if is_nested else x.ravel()).tolist(),
    }
    call = oip.decode(json.dumps({"inputs": [entry]}).encode(), None, None, PARAMETERS, LIMITS)
    assert call.values["x"].dtype == x.dtype
    np.testing.assert_array_equal(call.values["x"], x)


@pytest.mark.parametrize("shape", [(2, 1, 2, 1), (2, 0, 3), (0, 3), (1, 3, 0), (2,)])
@pytest.mark.parametrize("indent", [None, 4, 40])
def test_nested_data_may_have_white_space_and_be_empty(shape, indent):
    x = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    entry = {"name": "x", "shape": shape, "datatype": "INT16", "data": x.tolist()}
    call = oip.decode(json.dumps({"inputs": [entry]}, indent=indent).encode(), None, None, PARAMETERS, LIMITS)
    np.testing.assert_array_equal(call.values["x"], x, strict=True)


def test_nested_text_has_one_item_in_each_row():
    for data, is_right in (([["a"], ["b"]], True), ([["a", "b"], []], False), (["a", "b"], True)):
        entry = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": data}
        body = json.dumps({"inputs": [{"name": "x", "shape": [2], "datatype": "BOOL", "data": [True, False]}, entry]})
        if is_right:
            assert oip.decode(body.encode(), None, None, PARAMETERS, LIMITS).values["text"] == ["a", "b"]
        else:
            with pytest.raises(weft.errors.InvalidArgumentError, match="length 1"):
                oip.decode(body.encode(), None, None, PARAMETERS, LIMITS)


@pytest.mark.parametrize("name", DTYPES)
def test_batchers_know_the_dtype_of_every_form_again(name):
    """The key of the last call is remembered for arrays whose dtype is the same object."""
    dtype = np.dtype(DTYPES[name].type)
    x = np.ones((2, 3), dtype)
    headers, body = oip.encode_request({"x": x})
    length = dict(headers)[b"inference-header-content-length"]
    found = [oip.decode(body, length, None, PARAMETERS, LIMITS).values["x"]]
    if name not in ("FP16", "BF16"):
        for data in (x.tolist(), x.ravel().tolist()):
            entry = {"name": "x", "shape": [2, 3], "datatype": name, "data": data}
            body = json.dumps({"inputs": [entry]}).encode()
            found.append(oip.decode(body, None, None, PARAMETERS, LIMITS).values["x"])
    declared = {tensor.name: tensor for tensor in tensors_of({"x": x})}
    body = json.dumps({"inputs": x.tolist()}).encode()
    found.append(tfs.decode(body, declared, Parameters(lambda x: x), LIMITS).values["x"])
    for a in found:
        assert a.dtype is dtype
        for b in (x, *found):
            assert rows_alike(a, no_rows(b), False) == 2


def test_binary_bools_are_true_or_false():
    """Other bytes would be neither equal to True nor to False in NumPy, and undefined in C++."""
    entry = {"name": "x", "shape": [4], "datatype": "BOOL", "parameters": {"binary_data_size": 4}}
    head = json.dumps({"inputs": [entry]}).encode()
    call = oip.decode(head + b"\x00\x01\x02\xff", b"%d" % len(head), None, PARAMETERS, LIMITS)
    assert call.values["x"].dtype == bool
    assert call.values["x"].tobytes() == b"\x00\x01\x01\x01"


def test_a_long_text_among_numbers_takes_no_more_room_than_it_has():
    body = json.dumps({"instances": [1, "a" * 1_000_000, *[""] * 1_000_000]}).encode()  # 4 TB as an array of NumPy
    with pytest.raises(weft.errors.InvalidArgumentError, match="got `str`"):
        tfs.decode(body, None, PARAMETERS, LIMITS)


def test_a_shape_without_elements_may_be_too_large():
    for more in ({"data": []}, {"parameters": {"binary_data_size": 0}}):
        entry = {"name": "x", "shape": [0, 1 << 47, 1 << 47], "datatype": "FP32", **more}
        body = json.dumps({"inputs": [entry]}).encode()
        with pytest.raises(weft.errors.InvalidArgumentError, match="too big"):
            oip.decode(body, b"%d" % len(body), None, PARAMETERS, LIMITS)


def refused_or_decoded(body, header_length, declared):
    try:
        call = oip.decode(body, header_length, declared, PARAMETERS, LIMITS)
    except weft.errors.InvalidArgumentError:
        return
    assert all(len(value) == call.rows for value in call.values.values())


@given(tensors, st.data())
def test_broken_requests_are_refused(x, data):
    """A request cut, or with bytes changed, is decoded to arrays of its own shape or refused with a sentence."""
    headers, body = oip.encode_request({"x": x})
    length = dict(headers)[b"inference-header-content-length"]
    broken = bytearray(body[: data.draw(st.integers(0, len(body)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if broken:
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    declared = {t.name: t for t in tensors_of({"x": x})} if data.draw(st.booleans()) else None
    refused_or_decoded(bytes(broken), length, declared)


numbers = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.booleans(), st.none())
json_values = st.recursive(numbers, lambda x: st.lists(x, max_size=4), max_leaves=12)
inputs = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "text", "z"]),
        "shape": st.lists(st.one_of(st.integers(-1, 4), st.integers()), max_size=5),
        "datatype": st.sampled_from([*DTYPES, "BYTES", "FP99"]),
    },
    optional={"data": json_values, "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "q"]), numbers)},
)


@given(st.lists(inputs, max_size=3), st.binary(max_size=40), st.booleans())
def test_any_json_is_decoded_or_refused(given, rest, is_binary):
    text = json.dumps({"inputs": given}).encode()
    refused_or_decoded(text + rest if is_binary else text, b"%d" % len(text) if is_binary else None, None)


@given(st.one_of(st.fixed_dictionaries({}, optional={"instances": json_values, "inputs": json_values}), json_values))
def test_any_json_of_tensorflow_serving(value):
    for declared in (None, {t.name: t for t in tensors_of({"x": np.zeros((1, 2), np.int8)})}):
        try:
            call = tfs.decode(json.dumps(value).encode(), declared, PARAMETERS, LIMITS)
        except weft.errors.InvalidArgumentError:
            continue
        assert all(len(x) == call.rows for x in call.values.values())


@given(st.binary(max_size=60))
def test_any_bytes(body):
    refused_or_decoded(body, None, None)
    refused_or_decoded(body, body[:2], None)
