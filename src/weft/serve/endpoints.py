"""The endpoints: each takes an exchange and its route, and returns a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from ..batching.options import in_seconds
from ..errors import InvalidArgumentError
from . import errors, metrics, oip, openapi, tfs
from .dtypes import is_finite
from .errors import HttpError, TooLargeError
from .events import EventStream
from .http import Exchange, Reply, encode_json, json_reply
from .models import Model, Version
from .routes import Route
from .signature import Tensor, outputs_of

if TYPE_CHECKING:
    from .application import App

_HTML = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css", "/favicon.ico": "icon.svg"}
_TYPES = {"html": b"text/html; charset=utf-8", "js": b"text/javascript", "css": b"text/css", "svg": b"image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_PAGE_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
_NO_STORE = ((b"cache-control", b"no-store"),)

Endpoint = Callable[[Exchange, Route], Awaitable[Reply]]


class ModelCall(NamedTuple):
    """A call of a model that was decoded and checked, and the arguments of its batcher."""

    model: Model
    version: Version
    call: oip.Call
    args: tuple[Any, ...]
    named: dict[str, Any]


class Endpoints:
    """The endpoints of an app: methods with the names that `routes` has."""

    def __init__(self, app: App) -> None:
        self._app, self._models, self._limits = app, app.models, app.limits
        self._guard, self._watch = app.guard, app.watch

    # --- calls ---

    async def infer(self, exchange: Exchange, route: Route) -> Reply:
        """Answer a call of the Open Inference Protocol."""
        self._model(route)  # 404 before the body is read
        prepared = self.prepare(exchange, route, await self._body(exchange))
        return self.reply(prepared, await self._result(exchange, prepared))

    predict = infer  # TensorFlow Serving's REST API

    async def _body(self, exchange: Exchange) -> bytes | bytearray:
        return await exchange.body(self._limits, self._app.bodies)

    async def _result(self, exchange: Exchange, prepared: ModelCall) -> Any:
        """Call the model."""
        model, version, call, args, named = prepared
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        exchange.waiting = True
        model.calls += 1
        try:
            waiter = version.aio.start(loop, done.set_result, args, named, call.deadline, call.priority)
            exchange.call = waiter
            try:
                return (await done).outcome()
            finally:
                waiter.close()
        finally:
            exchange.call, exchange.waiting = None, False
            model.calls -= 1

    def prepare(self, exchange: Exchange, route: Route, body: bytes | bytearray) -> ModelCall:
        """Decode and check a call; nothing has been called yet."""
        model = self._model(route)
        version = self._version(model, route, is_stream=False)
        if route.endpoint == "infer":
            header_length = exchange.headers.get(b"inference-header-content-length")
            call = oip.decode(body, header_length, version.declared, version.parameters, self._limits)
        else:
            call = tfs.decode(body, version.declared, version.parameters, self._limits)
        self._check(exchange, model, version, call)
        return ModelCall(model, version, call, *version.parameters.arguments(call.values))

    def _check(self, exchange: Exchange, model: Model, version: Version, call: oip.Call) -> None:
        """Note what is called; refuse it if its values are not wanted, or the server is full."""
        exchange.version, exchange.rows = version.number, call.rows
        options = version.policy.options
        if call.rows > options.max_batch_size and not options.split and options.cost is None:
            raise TooLargeError(
                f"a call of {model.name} may have at most {options.max_batch_size} rows, got {call.rows}"
            )
        if version.refuse_nan:
            for name, value in call.values.items():
                if not is_finite(value):
                    raise InvalidArgumentError(f"input {name!r} must not have NaN or infinite values")
        if model.calls >= self._limits.calls:
            raise HttpError(429, f"{model.calls} calls of {model.name} are in the server: try again later")

    @staticmethod
    def reply(prepared: ModelCall, result: Any) -> Reply:
        version, call = prepared.version, prepared.call
        if not version.is_learned:
            version.learn(call.values, outputs_of(result, call.rows)[0])
        if isinstance(call, tfs.Predict):
            return Reply(200, (*oip.JSON, version.header), tfs.encode(call, result))
        headers, body = oip.encode(call, result, prepared.model.name, version.tag)
        return Reply(200, (*headers, version.header), body)

    async def generate_stream(self, exchange: Exchange, route: Route) -> Reply:
        """Answer a call with server-sent events, one for each chunk that the function yields."""
        model = self._model(route)
        body = await self._body(exchange)
        version = self._version(model, route, is_stream=True)
        call = _generate_call(body, version, self._limits, exchange)
        del body
        oip.refuse_binary_outputs(call)
        self._check(exchange, model, version, call)
        args, named = version.parameters.arguments(call.values)
        chunks = version.aio.stream(*args, deadline=call.deadline, priority=call.priority, **named)
        exchange.waiting, exchange.call = True, chunks
        model.calls += 1
        try:
            first = await anext(chunks)  # a failure before the first event is a plain reply
        except StopAsyncIteration:
            raise HttpError(500, "the model ended without a result") from None
        finally:
            exchange.waiting, exchange.call = False, None
            model.calls -= 1
        headers = ((b"content-type", b"text/event-stream"), *_NO_STORE, version.header)
        events = EventStream(exchange, call, model, version, chunks, first, self._limits.deadline)
        try:
            if not version.is_learned:
                version.learn(call.values, outputs_of(first, call.rows)[0])
        except BaseException:
            await events.aclose()
            raise
        return Reply(200, headers, b"", events)

    # --- models ---

    def _model(self, route: Route) -> Model:
        model = self._models.get(route.model)
        if model is None:
            raise HttpError(404, f"there is no model {route.model[:80]!r}; there are {', '.join(self._models)}")
        return model

    def _version(self, model: Model, route: Route, is_stream: bool | None = None) -> Version:
        """Return the version that answers; refuse if there is none, the path names another, or it answers in another way."""
        if self._app.is_draining:
            raise HttpError(503, "the server is shutting down", [(b"connection", b"close")])
        version = model.version
        if version is None:
            raise HttpError(503, f"the model {model.name} is not loaded: {model.problem or 'try again later'}")
        if route.version and route.version != version.tag:
            raise HttpError(404, f"the version of {model.name} is {version.tag}, got {route.version[:40]!r}")
        if is_stream is not None and model.is_hanging:
            sentence = f"a batch of {model.name} has been running for more than {self._limits.hang_time:g} s"
            raise HttpError(503, f"{sentence}: calls are refused until it ends")
        if is_stream is not None and version.is_stream != is_stream:
            how = "infer" if is_stream else "generate_stream"
            raise HttpError(
                400, f"the function of {model.name} {'does not yield' if is_stream else 'yields'}: call {how}"
            )
        return version

    async def metadata(self, _: Exchange, route: Route) -> Reply:
        model = self._model(route)
        version = self._version(model, route)
        return json_reply(
            {
                "name": model.name,
                "versions": [version.tag],
                "platform": "weft",
                "inputs": [tensor.metadata() for tensor in version.inputs],
                "outputs": [tensor.metadata() for tensor in version.outputs],
            }
        )

    async def config(self, _: Exchange, route: Route) -> Reply:
        """Describe a model as Triton's configuration does."""
        model = self._model(route)
        version = self._version(model, route)
        options = version.policy.options

        def described(tensor: Tensor) -> dict[str, Any]:
            kind = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
            return {"name": tensor.name, "data_type": f"TYPE_{kind}", "dims": [*tensor.shape]}

        return json_reply(
            {
                "name": model.name,
                "platform": "weft",
                "backend": "weft",
                "max_batch_size": options.max_batch_size,
                "input": list(map(described, version.inputs)),
                "output": list(map(described, version.outputs)),
                "dynamic_batching": {"max_queue_delay_microseconds": round(options.max_wait * 1e6)},
            }
        )

    async def model_ready(self, _: Exchange, route: Route) -> Reply:
        """Say whether a model answers."""
        model = self._model(route)
        self._version(model, route)
        why = self._app.why_not_ready().get(model.name) or (
            "the server is shutting down" if self._app.is_leaving else ""
        )
        if why:
            raise HttpError(503, why)
        return json_reply({"name": model.name, "ready": True})

    async def stats(self, _: Exchange, route: Route) -> Reply:
        """Return the statistics of one or all models."""
        models = [self._model(route)] if route.model else list(self._models.values())
        return json_reply({"model_stats": [_statistics(model) for model in models if model.version is not None]})

    async def index(self, exchange: Exchange, _: Route) -> Reply:
        """List all models; with {"ready": true} those that answer."""
        asked = oip.decode_options(await self._body(exchange), {"ready"})
        return json_reply(
            [
                {
                    "name": model.name,
                    "version": "" if model.version is None else model.version.tag,
                    "state": "READY" if model.is_ready else "UNAVAILABLE",
                    "reason": model.problem or ("a batch runs for too long" if model.is_hanging else ""),
                }
                for model in self._models.values()
                if model.is_ready or not asked.get("ready")
            ]
        )

    async def load(self, exchange: Exchange, route: Route) -> Reply:
        """Load a model anew: its next version answers when it is warm."""
        oip.decode_options(await self._check_change(exchange), ())
        model = self._model(route)
        version = await asyncio.shield(asyncio.ensure_future(model.load(self._limits.drain_time)))
        return json_reply({"name": model.name, "version": version.tag})

    async def unload(self, exchange: Exchange, route: Route) -> Reply:
        """End a model's calls, and answer no others until it is loaded again."""
        oip.decode_options(await self._check_change(exchange), {"unload_dependents"})
        model = self._model(route)
        await asyncio.shield(asyncio.ensure_future(model.unload(self._limits.drain_time)))
        return json_reply({"name": model.name})

    async def _check_change(self, exchange: Exchange) -> bytes | bytearray:
        self._guard.check_change(exchange)
        return await self._body(exchange)

    async def v1_status(self, _: Exchange, route: Route) -> Reply:
        """Say whether a model is available, as TensorFlow Serving does."""
        model = self._model(route)
        tag = "0" if model.version is None else model.version.tag
        if route.version and route.version != tag:
            raise HttpError(404, f"the version of {model.name} is {tag}, got {route.version[:40]!r}")
        return json_reply(tfs.status(tag, model.is_ready and not self._app.is_leaving, model.problem))

    async def v1_metadata(self, _: Exchange, route: Route) -> Reply:
        """Describe a model as TensorFlow Serving does."""
        model = self._model(route)
        version = self._version(model, route)
        return json_reply(tfs.metadata(model.name, version.tag, version.inputs, version.outputs))

    # --- the server ---

    async def server(self, _: Exchange, __: Route) -> Reply:
        extensions = ["binary_tensor_data", "model_repository", "model_configuration", "statistics"]
        return json_reply({"name": "weft", "version": openapi.version(), "extensions": extensions})

    async def live(self, _: Exchange, __: Route) -> Reply:
        """Say that the process answers, unless all models hang for too long."""
        if self._app.is_stuck():
            raise HttpError(503, f"all models have been hanging for more than {self._limits.hang_exit:g} s")
        return json_reply({"live": True})

    async def ready(self, _: Exchange, __: Route) -> Reply:
        """Say whether all models answer, and which do not."""
        found = self._app.why_not_ready()
        if self._app.is_leaving:
            raise HttpError(503, "the server is shutting down")
        if found:
            reply = {"error": "; ".join(found.values()), "models": found}
            return json_reply(reply, 503, errors.headers(HttpError(503, "")))
        return json_reply({"ready": True})

    async def metrics(self, _: Exchange, __: Route) -> Reply:
        return Reply(200, ((b"content-type", metrics.CONTENT_TYPE),), metrics.text(self._app))

    async def openapi(self, _: Exchange, __: Route) -> Reply:
        return json_reply(openapi.description(self._models, self._guard.has_token))

    # --- the page ---

    async def page(self, exchange: Exchange, _: Route) -> Reply:
        name = _HTML[self._app.path_of(exchange)]
        headers = ((b"content-type", _TYPES[name.rpartition(".")[2]]), *_PAGE_HEADERS)
        return Reply(200, headers, resources.files(__package__).joinpath("page", name).read_bytes())

    async def state(self, exchange: Exchange, _: Route) -> Reply:
        after = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1")).get("after", ["0"])[0]
        if not after.isdecimal() or len(after) > 15:
            raise InvalidArgumentError("after must be the id of a batch")
        return json_reply(self._watch.snapshot(int(after)) | {"draining": self._app.is_draining}, headers=_NO_STORE)

    async def options(self, exchange: Exchange, route: Route) -> Reply:
        """Change live options of a model's batcher."""
        body = await self._check_change(exchange)
        version = self._version(self._model(route), route)
        try:
            changes = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidArgumentError(f"the request must be a JSON object of options: {error}") from None
        allowed = sorted(openapi.OPTIONS)
        if unknown := set(changes) - set(allowed):
            raise InvalidArgumentError(
                f"the options that can be changed are {', '.join(allowed)}, got {min(unknown)[:80]!r}"
            )
        version.policy.update(**in_seconds(changes))
        return json_reply({name: getattr(version.policy.options, name) for name in allowed})


def _generate_call(body: bytes | bytearray, version: Version, limits: Any, exchange: Exchange) -> oip.Call:
    """Decode the body of a generate call: one of the Open Inference Protocol, or an object of plain inputs."""
    try:
        request = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        request = {"inputs": []}
    if isinstance(request, dict) and "inputs" not in request:
        names = [name for name in request if name in version.parameters.all]
        others = {name: value for name, value in request.items() if name not in names}
        given = others.pop("parameters", None)
        oip.refuse_unsupported(others | (given if isinstance(given, dict) else {}))
        rows = {name: [request[name]] for name in names}
        return tfs.decode(encode_json({"inputs": rows}), version.declared, version.parameters, limits)
    header_length = exchange.headers.get(b"inference-header-content-length")
    return oip.decode(body, header_length, version.declared, version.parameters, limits)


def _statistics(model: Model) -> dict[str, Any]:
    """Return a model's statistics as Triton names them; times are in nanoseconds."""
    seen = model.statistics()
    assert model.version is not None
    sizes = [{"batch_size": size, "compute_infer": {"count": count}} for size, count in seen.sizes.items()]
    return {
        "name": model.name,
        "version": model.version.tag,
        "inference_count": seen.rows,
        "execution_count": seen.batches,
        "inference_stats": {
            "success": {"count": seen.calls - seen.failed, "ns": round((seen.waits.total + seen.runs.total) * 1e9)},
            "fail": {"count": seen.failed, "ns": 0},
            "queue": {"count": seen.waits.count, "ns": round(seen.waits.total * 1e9)},
            "compute_infer": {"count": seen.runs.count, "ns": round(seen.runs.total * 1e9)},
        },
        "batch_stats": sizes,
    }
