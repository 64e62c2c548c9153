"""The options of a batcher, and the ones that can be changed while it runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import SequenceMatcher
from itertools import islice
from math import inf
from types import NoneType
from typing import Any, ClassVar, Literal, TypedDict

from ..core import check
from ..core.inputs import shown, with_article
from ..core.interrupts import as_exception
from ..core.representation import never_raises, repr_of
from ..core.warn import warn_caller
from ..errors import ArgumentTypeError, InvalidArgumentError, OpError
from . import lengths
from .lengths import Pad

#: The largest number of rows, batches or seconds that an option accepts.
LARGEST = 10**9
#: The most items of an option that is a list.
MOST_ITEMS = 100_000
#: The largest number of rows in a batch, unless the options say another.
DEFAULT_SIZE = 64


#: What is meant by names that others use, where that is not the option that is spelled most like it.
_MEANT = {
    "batch_sizes": "allowed_batch_sizes", "sizes": "allowed_batch_sizes",
    "max_rows": "max_batch_size", "max_size": "max_batch_size", "size": "max_batch_size",
    "batch_timeout": "max_wait", "batch_timeout_micros": "max_wait", "max_delay": "max_wait", "max_latency": "max_wait",
    "timeout": "deadline", "timeout_micros": "deadline", "timeout_ms": "deadline",
    "max_enqueued_batches": "max_queue", "queue_size": "max_queue",
    "concurrency": "parallel", "max_concurrency": "parallel", "num_batch_threads": "parallel", "num_threads": "parallel",
    "num_workers": "parallel", "threads": "parallel", "workers": "parallel",
}  # fmt: skip


class LiveOptions(TypedDict, total=False):
    """The options that `Batcher.update` changes."""

    max_batch_size: int | None
    min_batch_size: int | None
    max_wait: float
    max_queue: float | None
    deadline: float | None
    parallel: int
    allowed_batch_sizes: Sequence[int] | None
    gradient_deadline: float


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a batcher; `weft.batched` explains each of them.

    Once they are made, `max_batch_size` is a number, and lists are tuples.
    """

    max_batch_size: int = None  # type: ignore[assignment]  # what None stands for is put in its place
    max_wait: float = 0.0
    min_batch_size: int | None = None
    max_queue: float | None = None
    deadline: float | None = None
    parallel: int = 1
    split: bool = False
    allowed_batch_sizes: Sequence[int] | None = ()
    rows: bool = True
    key: Callable[..., Hashable] | None = None
    cost: Callable[..., int] | None = None
    shared: Sequence[str] = ()
    items: Sequence[str] = ()
    pad: Mapping[str, Pad] | None = None
    cut: Any = None
    max_waste: float | None = None
    ragged: Sequence[str] = ()
    vjp: Callable[..., tuple[Any, Callable[..., Any]]] | None = None
    pass_mask: str | None = None
    pass_rows: str | None = None
    pass_lengths: str | Mapping[str, str] | None = None
    on_error: Literal["isolate", "share"] = "isolate"
    wait_backward: bool = True
    on_missing_gradient: Literal["error", "zero"] = "error"
    gradient_deadline: float = 60.0
    recompute: bool = False
    on_loop: bool = False
    device: Any = None
    devices: Sequence[Any] = ()
    name: str | None = None

    _is_size_given: ClassVar[bool] = False  # whether `max_batch_size` was given: else it is that of the sizes

    @never_raises
    def __repr__(self) -> str:
        return f"Options({', '.join(f'{each.name}={repr_of(getattr(self, each.name))}' for each in fields(self))})"

    def __post_init__(self) -> None:
        try:
            self._check()
        except OpError:
            raise
        except BaseException as error:
            problem = as_exception(error)
            raise InvalidArgumentError(
                f"options must be plain values, got one whose own code raised {type(problem).__name__}"
            ) from problem

    def _check(self) -> None:
        if self.allowed_batch_sizes is None:
            self._set("allowed_batch_sizes", ())
        for name in ("allowed_batch_sizes", "shared", "items", "ragged", "devices"):
            self._set(name, _items(name, getattr(self, name)))
        for name in ("shared", "items", "ragged"):
            self._set(name, tuple(map(check.plain, getattr(self, name))))
            if not all(isinstance(each, str) for each in getattr(self, name)):
                raise InvalidArgumentError(
                    f"{name} must name parameters of the function, got {shown(getattr(self, name))}"
                )
        for name in ("split", "rows", "wait_backward", "recompute", "on_loop"):
            flag(name, getattr(self, name))
        for name in ("key", "cost", "vjp"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise InvalidArgumentError(f"{name} must be a function, got {shown(function)}")
        for name in ("pad", "pass_lengths", "cut"):
            self._set(name, _plain_names(getattr(self, name)))
        lengths.rules(self.pad, self.pass_lengths, self.cut)  # refuses wrong ones
        if self.max_waste is not None:
            self._set("max_waste", _number("max_waste", self.max_waste, 0, 1))
            if not self.pad:
                raise InvalidArgumentError("max_waste must be None where no argument is padded: it bounds the padding")
        self._check_numbers()
        for name in ("pass_mask", "pass_rows", "name", "on_error", "on_missing_gradient"):
            self._set(name, check.plain(getattr(self, name)))
        for name in ("pass_mask", "pass_rows"):
            if not isinstance(getattr(self, name), (str, NoneType)):
                raise InvalidArgumentError(
                    f"{name} must name a parameter of the function, got {shown(getattr(self, name))}"
                )
        if not isinstance(self.name, (str, NoneType)):
            raise InvalidArgumentError(f"name must be text, got {shown(self.name)}")
        self._check_devices()
        self._check_loop()
        _one_of("on_error", self.on_error, ("isolate", "share"))
        _one_of("on_missing_gradient", self.on_missing_gradient, ("error", "zero"))
        if self.fills_to > 1 and self.max_wait == 0:
            raise InvalidArgumentError(
                f"max_wait must be positive where a batch waits for min_batch_size = {self.min_batch_size} rows, got 0"
            )
        if self.split and self.cost is not None:
            raise InvalidArgumentError("cost must be None with split=True, which splits calls by their rows")

    def _check_devices(self) -> None:
        if self.device is not None and self.devices:
            raise InvalidArgumentError("device must be None where devices are given")
        if self.devices and self.parallel not in (1, len(self.devices)):
            raise InvalidArgumentError(
                f"parallel must be the number of devices, {len(self.devices)}, on each of which one batch runs, got {self.parallel}"
            )
        if self.devices:
            self._set("parallel", len(self.devices))

    def _check_loop(self) -> None:
        if self.on_loop and self.parallel > 1:
            raise InvalidArgumentError(
                f"parallel must be 1 with on_loop=True: an event loop runs one batch at a time, got {self.parallel}"
            )
        if self.on_loop and (self.device is not None or self.devices):
            raise InvalidArgumentError(
                "on_loop must be False where the function runs on another device: the event loop would wait for it, got True"
            )

    def _check_numbers(self) -> None:
        self._check_sizes()
        self._set("parallel", check.count("parallel", self.parallel, LARGEST))
        self._set("max_wait", _number("max_wait", self.max_wait, 0, LARGEST))
        self._set("gradient_deadline", _number("gradient_deadline", self.gradient_deadline, 1e-9, LARGEST))
        if self.max_queue is not None:
            rows = _number("max_queue", self.max_queue, 0, inf)
            self._set("max_queue", rows if rows == inf else min(rows, LARGEST))
        if self.deadline is not None:
            self._set("deadline", _number("deadline", self.deadline, 1e-9, LARGEST))

    def _check_sizes(self) -> None:
        given = self.allowed_batch_sizes or ()
        sizes = tuple(check.count("each of allowed_batch_sizes", size, LARGEST) for size in given)
        self._set("allowed_batch_sizes", sizes)
        check.increasing("allowed_batch_sizes", sizes)
        self._set("_is_size_given", self.max_batch_size is not None)
        if self.max_batch_size is None:  # with `cost` the sizes count rows, and `max_batch_size` costs
            self._set("max_batch_size", sizes[-1] if sizes and self.cost is None else DEFAULT_SIZE)
        most = check.count("max_batch_size", self.max_batch_size, LARGEST)
        self._set("max_batch_size", most)
        if sizes and self.cost is None and sizes[-1] < most:
            raise InvalidArgumentError(
                f"the last of allowed_batch_sizes must be at least max_batch_size = {most}, got {list(sizes)}"
            )
        if self.min_batch_size is not None:
            self._set("min_batch_size", check.count("min_batch_size", self.min_batch_size, most))

    def _set(self, name: str, value: Any) -> None:
        """Replace the given value of an option by its plain form."""
        object.__setattr__(self, name, value)

    @property
    def fills_to(self) -> int:
        """The number of rows that a batch waits for although nothing runs, 1 if it does not wait."""
        if self.min_batch_size is not None:
            return self.min_batch_size
        return self.max_batch_size if self.max_wait > 0 else 1

    def changed(self, changes: dict[str, Any]) -> Options:
        """Return these options with other values of some that can be changed while a batcher runs."""
        names = list(LiveOptions.__annotations__)
        refuse_unknown({name for name in changes if name not in OPTIONS})
        for name in changes:
            if name not in names:
                raise InvalidArgumentError(
                    f"the option {name} of a batcher cannot be changed: make another batcher; update changes {', '.join(names)}"
                )
        if not self._is_size_given:
            changes = {"max_batch_size": None, **changes}  # it goes on to be that of the sizes
        return replace(self, **changes)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Options:
        """Return options with these values; refuse unknown names."""
        refuse_unknown({name for name in values if name not in OPTIONS})
        options = cls(**values)
        warn_of_seconds(values)
        return options


#: The names of all options.
OPTIONS = tuple(field.name for field in fields(Options))


def warn_of_seconds(given: Mapping[str, Any]) -> None:
    """Warn of a `max_wait` that looks like milliseconds: an integer from 2 on."""
    seconds = check.plain(given.get("max_wait"))
    if type(seconds) is int and seconds > 1:
        warn_caller(
            f"max_wait is in seconds: a batch waits for up to {seconds} s. Write max_wait={seconds}.0 if that is meant, and "
            f"max_wait={seconds / 1000:g} for {seconds} ms"
        )


def in_seconds(given: dict[str, Any]) -> dict[str, Any]:
    """Return options of another process or another format, which may write 5.0 as 5, without what `warn_of_seconds` warns of."""
    seconds = given.get("max_wait")
    return {**given, "max_wait": float(seconds)} if type(seconds) is int and abs(seconds) <= LARGEST else given


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise an error if there are any of these names, none of which is an option."""
    for name in names:
        # Of two that are spelled as much like it, the first one of the list: `batch_size` means `max_batch_size`.
        closest = _MEANT.get(name) or max(OPTIONS, key=lambda option: _likeness(name, option))
        is_close = name in _MEANT or _likeness(name, closest) >= LEAST_LIKENESS
        hint = f"did you mean {closest}?" if is_close else "see help(weft.batched)"
        raise ArgumentTypeError(f"a batcher has no option {name}: {hint}")


#: How much like an option a name must be spelled to be taken for it, from 0 to 1.
LEAST_LIKENESS = 0.6


def _likeness(name: str, option: str) -> float:
    return SequenceMatcher(None, name, option).ratio()


def kind_of(f: Any) -> str:
    """Return what a function gives when it is called: "result", "coroutine", "generator" or "async generator"."""
    functions = [f, type(f).__call__]
    if "torch" in sys.modules and isinstance(f, sys.modules["torch"].nn.Module):
        functions.append(f.forward)
    for each in functions:
        for kind, is_kind in _KINDS.items():
            if is_kind(each):
                return kind
    return "result"


#: The kinds of functions that yield.
STREAMS = ("generator", "async generator")
_KINDS = {
    "coroutine": inspect.iscoroutinefunction,
    "generator": inspect.isgeneratorfunction,
    "async generator": inspect.isasyncgenfunction,
}


def check_function(f: Any, options: Options) -> str:
    """Return the kind of `f`; refuse to make a batcher of it if it is no function, or does not go with the options."""
    if isinstance(f, (classmethod, staticmethod)):
        raise InvalidArgumentError(
            f"a batcher must be made of a function: write @{type(f).__name__} above @weft.batched"
        )
    if not callable(f):
        raise InvalidArgumentError(f"a batcher is made of a function, got {shown(f)}")
    kind = kind_of(f)
    if kind in STREAMS and (options.split or options.vjp is not None):
        name, value = ("split", "False") if options.split else ("vjp", "None")
        raise InvalidArgumentError(
            f"{name} must be {value} for a function that gives a generator, whose calls are streams"
        )
    for name in ("recompute", "on_loop"):
        if kind != "result" and getattr(options, name):
            raise InvalidArgumentError(f"{name} must be False for a function that gives {with_article(kind)}, got True")
    if options.vjp is not None and kind_of(options.vjp) != "result":
        raise InvalidArgumentError(
            f"vjp must return its result at once, got a function that gives {with_article(kind_of(options.vjp))}"
        )
    return kind


def positive(name: str, seconds: Any) -> float:
    """Return a time in seconds, `LARGEST` at most; refuse one that is not a positive number."""
    found = check.plain(seconds)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < inf:
        raise InvalidArgumentError(f"{name} must be a positive number of seconds, got {_shown(seconds)}")
    return float(min(found, LARGEST))


def is_low_priority(priority: Any) -> bool:
    """Return True for "low" and False for "high"; refuse other names."""
    priority = check.plain(priority)
    if not isinstance(priority, str) or priority not in ("high", "low"):
        raise InvalidArgumentError(f'priority must be "high" or "low", got {shown(priority)}')
    return priority == "low"


def flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, got {_shown(value)}")


def _shown(value: Any) -> str:
    """Return a value for an error message, a scalar of NumPy as a number."""
    return shown(check.plain(value))


def _items(name: str, values: Any) -> tuple[Any, ...]:
    try:
        if not isinstance(values, (str, bytes)):
            found = tuple(islice(values, MOST_ITEMS + 1))
            if len(found) <= MOST_ITEMS:
                return found
    except TypeError:
        pass
    raise InvalidArgumentError(f"{name} must be a tuple or a list, got {_shown(values)}")


def _plain_names(given: Any) -> Any:
    """Return names, lists of names and dicts by name in the classes of Python itself; anything else unchanged."""
    if isinstance(given, Mapping):
        return {check.plain(name): _plain_names(given[name]) for name in given}
    return tuple(map(check.plain, given)) if isinstance(given, (list, tuple)) else check.plain(given)


def _number(name: str, value: Any, least: float, most: float) -> float:
    found = check.plain(value)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not least <= found <= most:
        bound = f"from {least:g} to {most:,}" if most < inf else f"of at least {least:g}"
        raise InvalidArgumentError(f"{name} must be a number {bound}, got {_shown(value)}")
    return found


def _one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")
