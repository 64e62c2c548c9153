"""The OpenAPI description of a server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version as version_of
from typing import Any

from .models import Model
from .signature import Tensor

#: The kinds of data that are not integers.
_KINDS = {"BOOL": "boolean", "BYTES": "string", "FP16": "number", "FP32": "number", "FP64": "number", "BF16": "number"}
#: The options of a batcher that can be changed while it runs.
OPTIONS = {
    "max_batch_size": {"type": "integer", "minimum": 1},
    "max_wait": {"type": "number", "minimum": 0},
    "min_batch_size": {"type": ["integer", "null"]},
    "max_queue": {"type": ["number", "null"]},
    "deadline": {"type": ["number", "null"]},
    "parallel": {"type": "integer", "minimum": 1},
    "allowed_batch_sizes": {"type": "array", "items": {"type": "integer", "minimum": 1}},
}


@cache
def version() -> str:
    """Return weft's version; to look it up reads a file."""
    return version_of("weft")


def description(models: Mapping[str, Model], has_token: bool) -> dict[str, Any]:
    """Return the description of all endpoints, with a path for each model's calls."""
    paths: dict[str, Any] = {
        "/healthz": {"get": _get("The process answers.")},
        "/readyz": {"get": _get("All models answer.", 503)},
        "/v2": {"get": _get("The server.")},
        "/v2/health/live": {"get": _get("The process answers.")},
        "/v2/health/ready": {"get": _get("All models answer.", 503)},
        "/v2/models/stats": {"get": _get("The statistics of all models.")},
        "/v2/repository/index": {"post": _get("All models.")},
        "/metrics": {
            "get": _answers("Prometheus's metrics.", {"200": {"description": "text", "content": {"text/plain": {}}}})
        },
    }
    for name, model in models.items():
        paths |= _paths(name, model)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "weft serve", "version": version()},
        "paths": paths,
        "components": {"schemas": {"Error": _object({"error": {"type": "string"}}, ["error"])}},
    }
    if has_token:
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


def _paths(name: str, model: Model) -> dict[str, Any]:
    inputs = () if model.version is None else model.version.inputs
    infer = _object(
        {
            "id": {"type": "string"},
            "inputs": {"type": "array", "minItems": 1, "items": _input(inputs)},
            "outputs": {"type": "array", "items": _object({"name": {"type": "string"}}, ["name"])},
            "parameters": _object(
                {
                    "timeout": {"type": "integer", "minimum": 0, "description": "microseconds"},
                    "priority": {"type": "integer", "minimum": 0, "description": "from 2 on: low"},
                    "binary_data_output": {"type": "boolean"},
                },
                [],
            ),
        },
        ["inputs"],
    )
    answered = _object(
        {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"type": "object"}},
        },
        ["model_name", "model_version", "outputs"],
    )
    rows = _object({"instances": {"type": "array", "minItems": 1}, "signature_name": {"type": "string"}}, ["instances"])
    columns = _object({"inputs": {}, "signature_name": {"type": "string"}}, ["inputs"])
    predicted = {"oneOf": [_object({"predictions": {}}, ["predictions"]), _object({"outputs": {}}, ["outputs"])]}
    change = (400, 403, 500, 501, 503)
    found = {
        f"/v2/models/{name}": {"get": _get("The model's inputs and outputs.", 503)},
        f"/v2/models/{name}/ready": {"get": _get("The model answers.", 503)},
        f"/v2/models/{name}/config": {"get": _get("The model's configuration.", 503)},
        f"/v2/models/{name}/stats": {"get": _get("The model's statistics.")},
        f"/v2/models/{name}/infer": {"post": _call("A call.", infer, answered)},
        f"/v1/models/{name}": {"get": _get("The model's status.")},
        f"/v1/models/{name}/metadata": {"get": _get("The model's inputs and outputs.", 503)},
        f"/v1/models/{name}:predict": {
            "post": _call("A call, by rows or by columns.", {"oneOf": [rows, columns]}, predicted)
        },
        f"/v2/repository/models/{name}/load": {"post": _get("Load the model anew.", *change)},
        f"/v2/repository/models/{name}/unload": {"post": _get("Unload the model.", *change)},
        f"/ui/models/{name}/options": {
            "post": _call("Change options of the batcher.", _object(OPTIONS, [], False), {"type": "object"}, *change)
        },
    }
    if model.version is not None and model.version.is_stream:
        call = _call("A call that is answered by server-sent events.", {"type": "object"}, {})
        call["responses"]["200"]["content"] = {"text/event-stream": {}}
        found[f"/v2/models/{name}/generate_stream"] = {"post": call}
        del found[f"/v2/models/{name}/infer"], found[f"/v1/models/{name}:predict"]
    return found


def _input(inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return the schema of an input of a call."""
    shape = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    choices = [
        _object(
            {
                "name": {"const": tensor.name},
                "datatype": {"const": tensor.datatype},
                "shape": shape,
                "data": {"type": "array", "description": f"{_KINDS.get(tensor.datatype, 'integer')}s, nested or flat"},
            },
            ["name", "datatype", "shape", "data"],
        )
        for tensor in inputs
    ]
    anything = {"name": {"type": "string"}, "datatype": {"type": "string"}, "shape": shape, "data": {"type": "array"}}
    return {"oneOf": choices} if len(choices) > 1 else choices[0] if choices else _object(anything, list(anything))


def _object(properties: Mapping[str, Any], required: list[str], more: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": dict(properties), "additionalProperties": more}
    return found | {"required": required} if required else found


def _answers(about: str, answers: Mapping[str, Any], *statuses: int) -> dict[str, Any]:
    error = {
        "description": "an error",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    return {"summary": about, "responses": {**answers, **{str(status): error for status in sorted(statuses)}}}


def _get(about: str, *statuses: int) -> dict[str, Any]:
    ok = {"200": {"description": about, "content": {"application/json": {"schema": {}}}}}
    return _answers(about, ok, 401, *statuses)


def _call(about: str, request: Any, answer: Any, *statuses: int) -> dict[str, Any]:
    ok = {"200": {"description": about, "content": {"application/json": {"schema": answer}}}}
    body = {"required": True, "content": {"application/json": {"schema": request}}}
    codes = statuses or (400, 404, 408, 413, 415, 429, 500, 501, 503, 504)
    return {**_answers(about, ok, 401, *codes), "requestBody": body}
