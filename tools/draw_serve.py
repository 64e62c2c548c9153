"""The requests that `fuzz_serve.py` sends, what their answers must be, and the models that are asked."""

from __future__ import annotations

import gzip
import json
import random
import re
import time
import zlib
from typing import Any, NamedTuple

import numpy as np

import weft
from weft.serve import oip, tfs
from weft.serve.dtypes import DATATYPES, DTYPES
from weft.serve.limits import Limits
from weft.serve.signature import Parameters, tensors_of

LIMITS = Limits(body_bytes=200_000, header_bytes=20_000, rows=200, tensors=8, rank=5, body_time=20.0, header_time=20.0)
NUMBERS = [dtype for name, dtype in DTYPES.items() if name != "BF16"]


def scale(x):
    with np.errstate(all="ignore"):
        return x * 2 + 1


def echo(x):
    return x


def pair(a, b=None):
    with np.errstate(all="ignore"):
        return {"a": a * 3, "rows": np.arange(len(a)) * 0 + a.shape[1], "b": a if b is None else b}


def text(words):
    return {"words": [word[::-1] for word in words], "sizes": np.array([len(word) for word in words], np.int32)}


def padded(x):
    return np.cumsum(x, 1)[:, -1]


def slow(x):
    time.sleep(0.003)
    return x[:, ::-1] - 1


class Served(NamedTuple):
    """A model, and what it computes, as the generator needs them."""

    f: Any
    example: dict[str, Any] | None
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.f.__name__


MODELS = {
    model.name: model
    for model in (
        Served(scale, {"x": np.ones((1, 3), np.float32)}, {"on_loop": True}),
        Served(echo, None, {"max_wait": 0.001, "on_loop": True}),
        Served(pair, {"a": np.ones((1, 2)), "b": np.ones((1,), np.int64)}, {}),
        Served(slow, {"x": np.ones((1, 2), np.int16)}, {"max_batch_size": 8, "max_queue": 20}),
        Served(text, {"words": ["a", "b"]}, {}),
        Served(
            padded, {"x": np.ones((1, 4), np.int32)}, {"pad": {"x": weft.Pad(axis=1)}} if hasattr(weft, "Pad") else {}
        ),
    )
}


class Request(NamedTuple):
    """The bytes of a request, and what its answer must be."""

    data: bytes
    statuses: set[int]  # those that are right
    values: dict[str, Any] | None  # of a 200
    closes: bool  # whether the connection ends with the answer
    is_framed: bool = True  # whether the next request begins where this one ends
    method: str = "POST"


def draw_values(r: random.Random, model: Served) -> dict[str, Any]:
    """Inputs that the model takes."""
    rows = r.choice([0, 1, 1, 2, 3, 7, 50])
    if model.f is text:
        return {
            "words": ["".join(r.choices('aä\U0001f600 \n"\\\x00z', k=r.choice([0, 1, 5, 40]))) for _ in range(rows)]
        }
    if model.f is scale:
        return {"x": draw_array(r, np.dtype(np.float32), (rows, 3))}
    if model.f is slow:
        return {"x": draw_array(r, np.dtype(np.int16), (rows, 2))}
    if model.f is pair:
        found = {"a": draw_array(r, np.dtype(np.float64), (rows, 2))}
        if r.random() < 0.7:
            found["b"] = draw_array(r, np.dtype(np.int64), (rows,))
        return dict(r.sample(list(found.items()), len(found)))
    if model.f is padded:
        return {"x": draw_array(r, np.dtype(np.int32), (rows, r.choice([4, 4, 1, 9]) if model.options else 4)) % 1000}
    shape = (rows, *(r.choice([0, 1, 2, 3]) for _ in range(r.choice([0, 1, 1, 2, 4]))))
    return {"x": draw_array(r, r.choice(NUMBERS), shape)}


def draw_array(r: random.Random, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    raw = np.frombuffer(r.randbytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    if dtype.kind == "b":
        return raw.view(np.uint8) > 128
    if dtype.kind == "f" and r.random() < 0.9:
        return (np.frombuffer(r.randbytes(int(np.prod(shape)) * 2), np.int16).reshape(shape) / 8).astype(dtype)
    return raw.copy()


def is_finite(values: dict[str, Any]) -> bool:
    return all(isinstance(x, list) or x.dtype.kind != "f" or bool(np.isfinite(x).all()) for x in values.values())


def dumps(r: random.Random, value: Any) -> bytes:
    text = json.dumps(value, indent=r.choice([None, None, None, 1, 4]), ensure_ascii=r.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def encode_oip(r: random.Random, values: dict[str, Any]) -> tuple[bytes, bytes | None]:
    """A body of the Open Inference Protocol and the length of its JSON, if it is not all JSON."""
    inputs, rest = [], b""
    for name, x in values.items():
        is_text = isinstance(x, list)
        shape = [len(x)] if is_text else list(x.shape)
        entry: dict[str, Any] = {"name": name, "shape": shape, "datatype": "BYTES" if is_text else DATATYPES[x.dtype]}
        if r.random() < 0.5 or not is_finite({name: x}) or (not is_text and x.dtype == np.float16):
            raw = oip.bytes_of(x) if is_text else x.tobytes()
            entry["parameters"] = {"binary_data_size": len(raw)}
            rest += raw
        elif is_text:
            if r.random() < 0.3:
                shape.append(1)
            entry["data"] = [[item] for item in x] if len(shape) == 2 and r.random() < 0.5 else x
        else:
            entry["data"] = x.tolist() if r.random() < 0.5 else x.ravel().tolist()
        inputs.append(dict(r.sample(list(entry.items()), len(entry))))
    request: dict[str, Any] = {"inputs": inputs}
    if r.random() < 0.3:
        request["id"] = r.choice(["", "7", "ä\U0001f600", "x" * 1000])
    if r.random() < 0.7 or not is_finite(values):
        request["parameters"] = {"binary_data_output": True if not is_finite(values) else r.random() < 0.5}
        if r.random() < 0.3:
            request["parameters"] |= {"timeout": r.choice([0, 30_000_000, 2000]), "priority": r.choice([0, 1, 2])}
    body = dumps(r, request)
    return body + rest, b"%d" % len(body) if rest or r.random() < 0.2 else None


def encode_tfs(r: random.Random, values: dict[str, Any]) -> bytes:
    plain = {name: x if isinstance(x, list) else x.tolist() for name, x in values.items()}
    (first, *others) = plain.values()
    if r.random() < 0.5 and first:
        rows = [dict(zip(plain, row, strict=True)) for row in zip(first, *others, strict=True)]
        return dumps(
            r, {"instances": [row[next(iter(plain))] for row in rows] if not others and r.random() < 0.5 else rows}
        )
    return dumps(r, {"inputs": first if not others and r.random() < 0.5 else plain})


def decoded(model: Served, is_oip: bool, body: bytes, length: bytes | None) -> Any:
    """The call that a body is, or the error that refuses it."""
    declared = None
    if model.example is not None:
        axes = {"x": 1} if model.options.get("pad") else {}
        declared = {tensor.name: tensor for tensor in tensors_of(model.example, axes)}
    parameters = Parameters(model.f)
    try:
        if is_oip:
            return oip.decode(body, length, declared, parameters, LIMITS)
        return tfs.decode(body, declared, parameters, LIMITS)
    except weft.errors.OpError as error:
        return error


NASTY_JSON = [
    b"null", b"-1", b"1e999", b"-0.0", b"NaN", b"Infinity", b"1e-999", b"9223372036854775808", b"-9223372036854775809",
    b"1" * 400, b"18446744073709551616", b'""', b'"\\ud800"', b'"\\udc00\\ud800"', b"[]", b"{}", b"[[]]", b"[" * 2000,
    b"[" * 50 + b"]" * 50, b"true", b'"\x00"', b"0x10", b"1.5", b"01", b"\xff", b"\xef\xbb\xbf", b"4294967296",
    b"281474976710656", b'{"b64":"/w=="}', b'{"b64":"!"}', b'{"b64":1}', b'"x"', b"[1,[2]]", b'"BYTES"', b'"FP16"', b'"BF16"',
    b"/**/",
]  # fmt: skip


def break_body(r: random.Random, body: bytes) -> bytes:
    """A body with some bytes changed."""
    for _ in range(r.choice([1, 1, 1, 2, 5])):
        kind = r.random()
        if kind < 0.4:  # a value of JSON becomes another one
            found = list(re.finditer(rb'-?\d+(\.\d+)?(e-?\d+)?|"[^"]*"|\[[^\[\]]*\]|true|false', body))
            if found:
                at = r.choice(found)
                body = body[: at.start()] + r.choice(NASTY_JSON) + body[at.end() :]
        elif kind < 0.5:
            body = body[: r.randrange(len(body) + 1)]
        elif kind < 0.6:
            at = r.randrange(len(body) + 1)
            body = body[:at] + r.randbytes(r.choice([1, 4, 100])) + body[at:]
        elif kind < 0.7 and len(body) > 4:  # a part twice, such as a key of JSON
            start = r.randrange(len(body))
            part = body[start : start + r.randrange(60)]
            body = body[:start] + part + body[start:]
        elif body:
            at = r.randrange(len(body))
            body = body[:at] + bytes([r.randrange(256)]) + body[at + 1 :]
    return body


HEADERS = [
    b"X-A: b", b"X-A:", b"Connection: keep-alive", b"Content-Type: application/json", b"Content-Type: text/plain", b"Accept: */*",
    b"Inference-Header-Content-Length: 5", b"Inference-Header-Content-Length: 99999999999",
    b"inference-header-content-length: -1", b"Inference-Header-Content-Length: 1_0", b"Content-Encoding: identity",
    b"Content-Encoding: br", b"Content-Encoding: gzip", b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"traceparent: 00-\xff-\xe4-01", b"Authorization: Bearer \xff", b"Origin: http://evil",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"Upgrade: websocket\r\nConnection: Upgrade", b"Expect: 100-continue", b"X: " + b"y" * 5000, b"Te: trailers",
    b"Cookie: \xc3\xa4",
]  # fmt: skip
WRONG_HEADERS = [
    b"Content-Length: 5", b"Content-Length: -5", b"Content-Length: 18446744073709551617", b"Content-Length: 0x5",
    b"Content-Length: 1, 2", b"Content-Length: +5", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked, identity", b" X: folded", b"X Y: z", b"X\x00: y", b"X: \x00", b": empty", b"no colon",
    b"X: a\r\n\tb", b"X: " + b"y" * 30_000, b"\r\n", b"X: a\nY: b", b"X: a\rb",
]  # fmt: skip
PATHS = [
    ("GET", "/healthz", 200), ("GET", "/v2/health/ready", 200), ("GET", "/v2", 200), ("GET", "/metrics", 200), ("GET", "/", 200),
    ("GET", "/openapi.json", 200), ("GET", "/ui/state?after=0", 200), ("GET", "/ui/state?after=-1", 400),
    ("GET", "/v2/models/stats", 200), ("GET", "/v2/models/echo/config", 200), ("GET", "/v1/models/echo/metadata", 200),
    ("GET", "/v1/models/text", 200), ("GET", "/v2/models/none", 404), ("GET", "/../../etc/passwd", 404), ("GET", "/%ff%00", 404),
    ("DELETE", "/v2/models/echo", 405), ("POST", "/v2/repository/index", 200), ("POST", "/v2/models/none/infer", 404),
    ("POST", "/v2/models/echo/versions/9/infer", 404), ("POST", "/v2/models/echo/generate_stream", 400),
    ("PUT", "/v2/models/echo/infer", 405), ("HEAD", "/healthz", 200), ("HEAD", "/x", 404), ("OPTIONS", "/v2", 405),
    ("POST", "/ui/models/none/options", 404), ("GET", "http://localhost/healthz", 200), ("HEAD", "/metrics", 200),
]  # fmt: skip


def draw_request(r: random.Random) -> Request:
    if r.random() < 0.15:
        return plain_request(r)
    model = MODELS[r.choice(list(MODELS))]
    values = draw_values(r, model)
    is_oip = r.random() < 0.6
    body, length = encode_oip(r, values) if is_oip else (encode_tfs(r, values), None)
    headers = []
    if r.random() < 0.4:
        body = break_body(r, body)
    if length is not None:
        if r.random() < 0.05:
            length = r.choice(
                [b"0", b"-1", b"1", b"%d" % (len(body) + 1), b"%d" % len(body), b"abc", b"1" * 30, b"\xb2"]
            )
        headers.append(b"Inference-Header-Content-Length: " + length)
    call = decoded(model, is_oip, body, length)
    statuses, answer = {200}, None
    if isinstance(call, weft.errors.OpError):
        statuses = {call.http_status}
    else:
        try:
            if model.f is echo and isinstance(call.values["x"], list):
                raise TypeError  # nobody has declared text
            answer = expected(model, call)
        except Exception:
            statuses = {200, 400, 500}  # the function fails on such values; another caller's batch may have fit it
        if is_oip and answer is not None and statuses == {200}:
            statuses = {200, 400, 412, 500} if not is_finite(answer) else {200}
        if call.deadline is not None or model.f is slow:
            statuses = {*statuses, 504, 429}
    version = r.choice(["", "", "/versions/1"])
    path = f"/v2/models/{model.name}{version}/infer" if is_oip else f"/v1/models/{model.name}{version}:predict"
    if r.random() < 0.1:
        path = path.replace("o", "%6F", 1) + "?q=1"
    return framed(r, "POST", path, body, headers, statuses, answer)


def expected(model: Served, call: oip.Call) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        if not call.rows:
            return {}
        found = model.f(**{name: x if isinstance(x, list) else x.copy() for name, x in call.values.items()})
    named = found if isinstance(found, dict) else {"output": found}
    if call.outputs is not None:
        names = {wanted.name for wanted in call.outputs}
        if names - named.keys():
            raise KeyError
        named = {name: x for name, x in named.items() if name in names}
    return named


def plain_request(r: random.Random) -> Request:
    method, path, status = r.choice(PATHS)
    body = r.randbytes(r.choice([0, 0, 10, 3000])) if method not in ("GET", "HEAD") or r.random() < 0.2 else b""
    statuses = {status, 400, 403} if method == "POST" else {status}
    return framed(r, method, path, body, [], statuses, None)


def framed(
    r: random.Random, method: str, path: str, body: bytes, headers: list[bytes], statuses: set[int], values: Any
) -> Request:
    """A request around a body: with a length, in chunks or compressed, by a client of HTTP/1.1 or 1.0."""
    closes, version = False, "1.1"
    headers = [b"Host: localhost", *headers]
    if r.random() < 0.15 and body:
        kind = r.choice([b"gzip", b"deflate"])
        body = gzip.compress(body, 1) if kind == b"gzip" else zlib.compress(body, 1)
        headers.append(b"Content-Encoding: " + kind)
    if r.random() < 0.05:
        closes = True
        headers.append(b"Connection: close")
    elif r.random() < 0.03:
        closes, version = True, "1.0"
    may_close, is_framed = False, True
    for _ in range(r.choice([0, 0, 0, 1, 2])):
        header = r.choice(HEADERS)
        if b"Content-Encoding" in header and any(other.startswith(b"Content-Encoding") for other in headers):
            continue  # which of them counts is not said
        if b"identity" not in header and (b"inference-header" in header.lower() or b"Encoding" in header):
            statuses, values = {*statuses, 200, 400, 415}, None
        if header.startswith(b"Expect"):
            may_close = True
        if b"Upgrade" in header:
            statuses = {*statuses, 400}
            may_close = True
        headers.append(header)
    if version == "1.1" and r.random() < 0.25:
        headers.append(b"Transfer-Encoding: chunked")
        body = chunked(r, body)
    elif body or method == "POST" or r.random() < 0.1:
        headers.append(b"Content-Length: %d" % len(body))
    r.shuffle(headers)
    if r.random() < 0.08:
        headers.insert(r.randrange(len(headers) + 1), r.choice(WRONG_HEADERS))
        statuses, values, is_framed = {*statuses, 400, 404, 405, 408, 413, 415, 431, 200}, None, False
    head = b"\r\n".join([f"{method} {path} HTTP/{version}".encode(), *headers, b"", b""])
    if r.random() < 0.03:
        head = break_body(r, head)
        statuses, values, is_framed = set(range(200, 600)) - set(range(500, 600)), None, False
    return Request(head + body, statuses, values, closes or may_close, is_framed, method)


def chunked(r: random.Random, body: bytes) -> bytes:
    parts, at = [], 0
    while at < len(body):
        size = r.choice([1, 2, 17, 300, 100_000])
        part = body[at : at + size]
        extension = r.choice([b"", b"", b"", b";a", b';a="b c"', b";a=b"])
        parts.append(b"%x" % len(part) + extension + b"\r\n" + part + b"\r\n")
        at += size
    trailers = r.choice(
        [b"", b"", b"", b"X: y\r\n", b"Inference-Header-Content-Length: 3\r\n", b"Expect: 100-continue\r\n"]
    )
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"
