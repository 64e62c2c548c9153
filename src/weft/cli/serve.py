"""`weft serve`: models behind HTTP, from a file or a module."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import InvalidArgumentError, OpError

NEEDED = ("uvicorn", "httptools", "msgspec")
#: Options of `weft.batched` for plain functions, with the type of their values and what they say.
OPTIONS: dict[str, tuple[type, str]] = {
    "max_batch_size": (int, "the largest number of rows in a batch (default: 64)"),
    "max_wait": (float, "the seconds that a batch waits for more rows (default: 0)"),
    "min_batch_size": (int, "the number of rows with which a batch does not wait"),
    "max_queue": (int, "the number of rows that may wait; further calls get status 429 (default: 4096)"),
    "deadline": (float, "the seconds that a call waits; then it gets status 504"),
    "parallel": (int, "the number of batches that run at once (default: 1)"),
    "on_loop": (bool, "run batches in the event loop, for functions that take microseconds and never block"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets", nargs="+", metavar="TARGET",
        help="what to serve: FILE.py, FILE.py:OBJECT or MODULE:OBJECT; NAME=... gives it another name",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8000, help="the port, 0 for any free one (default: 8000)")
    parser.add_argument(
        "--factory", action="store_true", help="OBJECT is a function that returns the function to serve"
    )
    batching = parser.add_argument_group("options of weft.batched, for plain functions")
    for name, (kind, help_text) in OPTIONS.items():
        value: dict[str, Any] = (
            {"action": "store_const", "const": True} if kind is bool else {"type": kind, "metavar": "N"}
        )
        batching.add_argument(f"--{name.replace('_', '-')}", help=help_text, **value)
    parser.add_argument("--library", choices=["numpy", "torch", "jax"], help="the arrays that plain functions take")
    parser.add_argument("--device", help="where arrays of torch or jax go, such as cuda")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file with the bearer token that requests need (or the variable WEFT_TOKEN)",
    )
    parser.add_argument("--certificate", metavar="FILE", help="the TLS certificate")
    parser.add_argument("--key", metavar="FILE", help="the key of the TLS certificate")
    parser.add_argument(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which the server is reached, as in the Host header: without a token it answers to localhost, to "
        "addresses and to these names alone; may be repeated",
    )
    parser.add_argument(
        "--access-log",
        choices=["all", "errors", "none"],
        default="errors",
        help="which answers are logged: all, those with status 401, 403, 404 and from 500 on, or none (default: errors)",
    )
    parser.add_argument(
        "--drain-delay",
        type=float,
        metavar="SECONDS",
        help="how long calls are still taken after SIGTERM while readiness is off (default: 0)",
    )
    parser.add_argument(
        "--hang-exit",
        type=float,
        metavar="SECONDS",
        help="how long all models may hang before /healthz fails, so that a supervisor restarts the server (default: never)",
    )
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help="a limit of weft.serve.Limits, such as body_bytes=1000000",
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {text}")
    return port


_port.__name__ = "port"  # for argparse's message "invalid port value"


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes; return the exit status."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"weft: serve needs {', '.join(missing)}: pip install 'weft[serve]'", file=sys.stderr)
        return 2
    from .. import batched
    from ..serve import App, access, load, server

    faulthandler.enable()
    outlet = access.Outlet(sys.stderr)
    logging.basicConfig(stream=outlet, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each request that is no HTTP
    given: dict[str, Any] = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    try:
        batched(**given)  # refuses wrong values
        given |= {name: value for name in ("library", "device") if (value := getattr(options, name)) is not None}
        models = [model for text in options.targets for model in load.Target(text, options.factory, given).models()]
        app = App(
            models,
            limits=_limits(options.limit, drain_delay=options.drain_delay, hang_exit=options.hang_exit),
            token=_token(options.token_file),
            hosts=options.host_name,
            access_log=options.access_log,
        )
        made = server.make(
            app, host=options.host, port=options.port, certificate=options.certificate, key=options.key, told=_tell
        )
    except (OpError, OSError) as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2
    return server.run(made)


def _tell(server: Any) -> None:
    address = server.address()
    for name, model in server.app.models.items():
        how = "generate_stream" if model.version.is_stream else "infer"
        print(f"weft: {name} is ready at {address}v2/models/{name}/{how}")
    print(f"weft: look at {address} (Ctrl-C ends it)", flush=True)


def _token(path: str | None) -> str | None:
    if path is None:
        return os.environ.get("WEFT_TOKEN") or None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the token file {path} cannot be read: {error}") from None


def _limits(pairs: list[str], **options: float | None) -> Any:
    """Return the limits: those of `--limit`, and those that have options of their own."""
    from ..serve import Limits

    known = {field.name: int if field.type == "int" else float for field in fields(Limits)}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name not in known or not equals:
            raise InvalidArgumentError(f"a limit is NAME=N with one of {', '.join(sorted(known))}, got {pair!r}")
        try:
            given[name] = known[name](value)
        except ValueError:
            kind = "an integer" if known[name] is int else "a number"
            raise InvalidArgumentError(f"the limit {name} must be {kind}, got {value!r}") from None
    return Limits(**given)
