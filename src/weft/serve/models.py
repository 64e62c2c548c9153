"""A served model: its function behind a batcher, its signature and its versions. Nothing here knows of HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..batching.batcher import Batcher
from ..batching.decorator import batched
from ..batching.options import Options, in_seconds
from ..errors import FailedPreconditionError, InvalidArgumentError
from .libraries import check_library, library_of_function, on_numpy, streams, to_numpy
from .signature import Parameters, Tensor, outputs_of, tensors_of

log = logging.getLogger("weft.serve")

#: The options of a plain function's batcher, unless others are given.
DEFAULTS: dict[str, Any] = {"max_queue": 4096, "split": True}


@dataclass(frozen=True)
class Recipe:
    """How a version of a model is made: a function or a batcher, or a factory that returns one, and what it is served with."""

    f: Callable[..., Any] | None
    factory: Callable[[], Callable[..., Any]] | None
    example: Mapping[str, Any] | None
    library: str | None
    device: str | None
    refuse_nan: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    def function(self) -> Callable[..., Any]:
        """Return the function or batcher; this may take long."""
        if self.f is not None:
            return self.f
        assert self.factory is not None
        return self.factory()


class Version:
    """One loaded version of a model."""

    def __init__(self, number: int, recipe: Recipe, name: str) -> None:
        f = recipe.function()
        example = recipe.example
        library = recipe.library or library_of_function(getattr(f, "__wrapped__", f), example)
        self.number, self.tag = number, str(number)
        self.header = (b"weft-model-version", self.tag.encode())
        self.policy = _policy(f, recipe, library, name)
        options = self.policy.options
        self.parameters = Parameters(self.policy, (options.pass_mask, options.pass_rows))
        self.example = None if example is None else self._check_example(example)
        self.aio = self.policy.aio
        self.is_stream = streams(f)  # whether the function yields
        self.is_own = self.policy is not f  # whether the server made the batcher, and may close it
        #: The declared inputs, which calls are checked against.
        self.declared: dict[str, Tensor] | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self.is_learned = False  # True once inputs and outputs are known
        self.refuse_nan = recipe.refuse_nan
        if self.example is not None:
            padded = {name: pad.axis for name, pad in (options.pad or {}).items()}
            self.inputs = tensors_of(self.example, padded)
            self.declared = {tensor.name: tensor for tensor in self.inputs}

    def _check_example(self, example: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: x if isinstance(x, list) else to_numpy(x) for name, x in example.items()}
        self.parameters.check(list(values))
        for name, x in values.items():
            is_text = isinstance(x, list) and all(isinstance(item, str) for item in x)
            if not (is_text or (isinstance(x, np.ndarray) and x.ndim)) or not len(x):
                raise InvalidArgumentError(
                    f"the example of input {name!r} must be an array with one or more rows, or a list of text, got {x!r:.80}"
                )
        if len({len(x) for x in values.values()}) != 1:
            raise InvalidArgumentError("all arrays of an example must have the same number of rows")
        return values

    async def warm_up(self) -> None:
        """Run the example, in every size that batches are padded to."""
        if self.example is None:
            return
        rows = len(next(iter(self.example.values())))
        sizes = self.policy.options.allowed_batch_sizes or (rows,)
        for size in sizes:
            values = {name: _repeat(x, size) for name, x in self.example.items()}
            args, named = self.parameters.arguments(values)
            result = await self._first(*args, **named)
            outputs, _ = outputs_of(result, size)
            self.outputs = tensors_of(outputs)
        self.is_learned = True

    async def _first(self, *args: Any, **named: Any) -> Any:
        """Return the result of a call, the first chunk of one that streams."""
        if not self.is_stream:
            return await self.aio(*args, **named)
        chunks = self.aio.stream(*args, **named)
        result = await anext(chunks)
        await chunks.aclose()
        return result

    def learn(self, values: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Take inputs and outputs from a call that succeeded."""
        self.inputs, self.outputs, self.is_learned = tensors_of(values), tensors_of(outputs), True

    async def close(self, seconds: float) -> None:
        """Run the calls that wait, then refuse others."""
        if self.is_own:
            await _in_thread(lambda: self.policy.close(timeout=seconds))


class Model:
    """A model under a name; `weft.serve.model` makes one."""

    def __init__(self, name: str | None, recipe: Recipe) -> None:
        self.given_name, self.recipe = name, recipe
        self.name = check_name(name or _name_of(recipe.f or recipe.factory))
        self.source: Callable[[], Recipe] | None = None  # reads the recipe again, for a reload
        self.version: Version | None = None
        self.hangs_since: float | None = None  # of `time.monotonic`, while a batch runs for too long
        self.problem = ""  # why the last load failed
        self.statuses: Counter[int] = Counter()  # of the answers
        self.calls = 0  # in the server now
        self.chunks = 0  # of streams that were sent
        self._loading = asyncio.Lock()
        self._numbers = 0

    @property
    def is_hanging(self) -> bool:
        """Whether a batch runs for too long."""
        return self.hangs_since is not None

    @property
    def is_ready(self) -> bool:
        """Whether calls are answered."""
        return self.version is not None and not self.is_hanging

    async def load(self, drain_time: float = 30.0) -> Version:
        """Load the first or the next version, warm it up, and answer with it from now on; the old one ends its calls."""
        async with self._loading:
            try:
                fresh = await _in_thread(self._next_version)
                await fresh.warm_up()
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
                log.exception("model %s: version %d could not be loaded", self.name, self._numbers + 1)
                raise FailedPreconditionError(f"the model {self.name} could not be loaded: {self.problem}") from error
            old, self.version = self.version, fresh
            self._numbers, self.problem, self.hangs_since = fresh.number, "", None
            log.info("model %s: version %d is ready", self.name, fresh.number)
            if old is not None and old.policy is not fresh.policy:
                await _end(old, drain_time)
            return fresh

    def _next_version(self) -> Version:
        if self._numbers:
            if self.source is not None:
                self.recipe = self.source()
            elif self.recipe.factory is None and self.version is not None:
                raise FailedPreconditionError(
                    "it was given as a function: a factory can be called again to load it anew"
                )
        return Version(self._numbers + 1, self.recipe, self.name)

    async def unload(self, drain_time: float = 30.0) -> None:
        """End the calls of the current version, and answer no others."""
        async with self._loading:
            old, self.version = self.version, None
            if old is not None:
                await _end(old, drain_time)

    def log_failure(self, error: BaseException) -> None:
        """Log an error of the model's function with its traceback."""
        log.error("model %s failed", self.name, exc_info=error)

    def statistics(self) -> Any:
        """Return the statistics of the current version's batcher."""
        return None if self.version is None else self.version.policy.statistics()


async def _in_thread(f: Callable[[], Any]) -> Any:
    """Return what `f` returns in a thread of its own. One that hangs does not keep the process from ending, as asyncio's would."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(f))
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # such as SystemExit, which would end the server
            future.set_exception(FailedPreconditionError(f"it was ended by {type(error).__name__}: {error}"))

    threading.Thread(target=run, name="weft-load", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _end(version: Version, seconds: float) -> None:
    try:
        await version.close(seconds)
    except Exception as error:
        log.warning("version %d did not end: %s", version.number, error)


def model(
    f: Callable[..., Any] | None = None,
    /,
    *,
    factory: Callable[[], Callable[..., Any]] | None = None,
    example: Mapping[str, Any] | None = None,
    name: str | None = None,
    library: str | None = None,
    device: str | None = None,
    refuse_nan: bool = False,
    **options: Any,
) -> Model:
    """Return a model to serve: a function, plain or made with `weft.batched`.

    - `factory`: a function that returns the function, in place of `f`; a reload calls it again.
    - `example`: the inputs of one call by parameter name: arrays with rows, or lists of text. Their dtypes and trailing shapes
      are the model's, and the warm-up is a call with them. Without it they are learned from the first call, and not checked.
    - `name`: the model's name; the default is the function's.
    - `library`: "numpy", "torch" or "jax", the arrays that the function takes; the default is that of the example.
    - `device`: where arrays of PyTorch or JAX go, such as "cuda".
    - `refuse_nan`: refuse inputs with NaN or infinite values.
    - `options`: those of `weft.batched`, for a plain function.
    """
    if (f is None) == (factory is None):
        raise InvalidArgumentError("a model is made of a function or of a factory, got both or neither")
    given = f if f is not None else factory
    if not callable(given):
        raise InvalidArgumentError(f"a model is made of a function, got {given!r}")
    Options.of(options)  # refuses wrong ones, and warns of odd ones
    if example is not None and not isinstance(example, Mapping):
        raise InvalidArgumentError(f"example must be a dict of arrays by input name, got {example!r:.80}")
    if library is not None:
        check_library(library)
    return Model(name, Recipe(f, factory, example, library, device, refuse_nan, in_seconds(options)))


def as_model(given: Any) -> Model:
    """Return a model of what `weft.serve.app` is given: a model, a batcher or a function."""
    return given if isinstance(given, Model) else model(given)


def check_name(name: str) -> str:
    """Return the name of a model; refuse one that does not fit into a path."""
    if not re.fullmatch(r"\w[\w.\-]*", name, re.ASCII):
        raise InvalidArgumentError(
            f"the name of a model must consist of letters, digits, '_', '-' and '.', got {name!r}: give name="
        )
    return name


def _name_of(f: Any) -> str:
    wrapped = getattr(f, "__wrapped__", f)
    return str(getattr(wrapped, "__name__", type(wrapped).__name__))


def _policy(f: Any, recipe: Recipe, library: str, name: str) -> Any:
    """Return the batcher of a function: its own if it can be used as it is, else one with the same options."""
    options = dict(recipe.options)
    if not isinstance(f, Batcher):
        text = tuple(key for key, value in (recipe.example or {}).items() if isinstance(value, list))
        defaults = {**DEFAULTS, "split": not streams(f)}  # a stream is not split
        given = {**defaults, **({"items": text} if text else {}), **options, "name": name}
        return batched(on_numpy(f, library, recipe.device), **given)
    if options:
        raise InvalidArgumentError(
            f"the options of {name} are those of its batcher: give {', '.join(options)} to weft.batched"
        )
    own = f.options
    if own.rows and library == "numpy":
        return f
    if own.key is not None or own.cost is not None:
        raise InvalidArgumentError(
            f"{name} has key or cost, functions of what callers pass: make the batcher with rows=True and of NumPy to serve it"
        )
    inner = on_numpy(getattr(f, "__wrapped__", f), library, recipe.device)
    return Batcher(inner, replace(own, rows=True, name=name, vjp=None, shared=()))


def _repeat(x: Any, rows: int) -> Any:
    """Return an example with `rows` rows."""
    if len(x) == rows:
        return x
    return [x[i % len(x)] for i in range(rows)] if isinstance(x, list) else np.resize(x, (rows, *x.shape[1:]))
