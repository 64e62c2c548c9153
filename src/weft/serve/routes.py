"""The paths of the server: which endpoint, model and version a request is for."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import HttpError


class Route(NamedTuple):
    """An endpoint, its method, and the model and version in the path."""

    endpoint: str
    method: str = "GET"
    model: str = ""
    version: str = ""


_EXACT = {
    "/": Route("page"),
    "/page.js": Route("page"),
    "/page.css": Route("page"),
    "/favicon.ico": Route("page"),
    "/healthz": Route("live"),
    "/readyz": Route("ready"),
    "/metrics": Route("metrics"),
    "/openapi.json": Route("openapi"),
    "/ui/state": Route("state"),
    "/v2": Route("server"),
    "/v2/": Route("server"),
    "/v2/health/live": Route("live"),
    "/v2/health/ready": Route("ready"),
    "/v2/models/stats": Route("stats"),
    "/v2/repository/index": Route("index", "POST"),
}

_NAME, _VERSION = r"(?P<model>[^/]+)", r"(?:/versions/(?P<version>[^/]+))?"
_PATTERNS = [
    (re.compile(rf"/v2/models/{_NAME}{_VERSION}(?:/(?P<rest>infer|generate_stream|ready|config|stats))?"), "model"),
    (re.compile(rf"/v2/repository/models/{_NAME}/(?P<rest>load|unload)"), "repository"),
    (re.compile(r"/v1/models/(?P<model>[^/:]+)(?:/versions/(?P<version>[^/:]+))?(?P<rest>:predict|/metadata)?"), "v1"),
    (re.compile(rf"/ui/models/{_NAME}/(?P<rest>options)"), "ui"),
]
_ENDPOINTS = {
    ("model", None): ("metadata", "GET"),
    ("model", "infer"): ("infer", "POST"),
    ("model", "generate_stream"): ("generate_stream", "POST"),
    ("model", "ready"): ("model_ready", "GET"),
    ("model", "config"): ("config", "GET"),
    ("model", "stats"): ("stats", "GET"),
    ("repository", "load"): ("load", "POST"),
    ("repository", "unload"): ("unload", "POST"),
    ("v1", None): ("v1_status", "GET"),
    ("v1", "/metadata"): ("v1_metadata", "GET"),
    ("v1", ":predict"): ("predict", "POST"),
    ("ui", "options"): ("options", "POST"),
}


def find(method: str, path: str) -> Route:
    """Return the route of a request; refuse unknown paths with 404 and other methods with 405."""
    route = _EXACT.get(path) or _match(path)
    if route is None:
        raise HttpError(404, f"there is no {path[:200]!r} here; /openapi.json lists what there is")
    if method != route.method and not (method == "HEAD" and route.method == "GET"):
        raise HttpError(405, f"the method of {path[:200]!r} is {route.method}", [(b"allow", route.method.encode())])
    return route


def _match(path: str) -> Route | None:
    for pattern, group in _PATTERNS:
        found = pattern.fullmatch(path)
        if found is not None:
            parts = found.groupdict()
            endpoint, method = _ENDPOINTS[group, parts["rest"]]
            return Route(endpoint, method, parts["model"], parts.get("version") or "")
    return None
