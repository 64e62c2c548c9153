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

#: The paths of probes, which answer under any name and without a token.
PROBES = {path for path, route in _EXACT.items() if route.endpoint in ("live", "ready")}

_MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
_V1_MODEL = r"/v1/models/(?P<model>[^/:]+)(?:/versions/(?P<version>[^/:]+))?"
_PATTERNS = {
    _MODEL: Route("metadata"),
    rf"{_MODEL}/infer": Route("infer", "POST"),
    rf"{_MODEL}/generate_stream": Route("generate_stream", "POST"),
    rf"{_MODEL}/ready": Route("model_ready"),
    rf"{_MODEL}/config": Route("config"),
    rf"{_MODEL}/stats": Route("stats"),
    r"/v2/repository/models/(?P<model>[^/]+)/load": Route("load", "POST"),
    r"/v2/repository/models/(?P<model>[^/]+)/unload": Route("unload", "POST"),
    _V1_MODEL: Route("v1_status"),
    rf"{_V1_MODEL}/metadata": Route("v1_metadata"),
    rf"{_V1_MODEL}:predict": Route("predict", "POST"),
    r"/ui/models/(?P<model>[^/]+)/options": Route("options", "POST"),
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
    for pattern, route in _PATTERNS.items():
        found = re.fullmatch(pattern, path)
        if found is not None:
            return route._replace(**found.groupdict(default=""))
    return None
