"""What type checkers and editors know of `weft.batched`: its options, and the signatures of awaitable calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from .lengths import Pad
from .statistics import Receipt

if TYPE_CHECKING:
    from .streams import AsyncStream

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
T = TypeVar("T")

if TYPE_CHECKING:
    # Type checkers see what callers get: a function that returns `PerRow(items)` gives each of them a list of its items.
    def PerRow(items: Iterable[T]) -> list[T]:
        """A result with one item for each row of the batch."""

    def Shared(value: T) -> T:
        """A result for all callers of the batch."""

else:
    from .results import PerRow as PerRow
    from .results import Shared as Shared


class PlainOptions(TypedDict, total=False):
    """The options with which a batcher has the signature of its function."""

    max_batch_size: int | None
    max_wait: float
    min_batch_size: int | None
    max_queue: float | None
    deadline: float | None
    parallel: int
    split: bool
    allowed_batch_sizes: Sequence[int] | None
    key: Callable[..., Hashable] | None
    cost: Callable[..., int] | None
    shared: Sequence[str]
    items: Sequence[str]
    pad: Mapping[str, Pad] | None
    cut: Any
    max_waste: float | None
    vjp: Callable[..., tuple[Any, Callable[..., Any]]] | None
    on_error: Literal["isolate", "share"]
    wait_backward: bool
    on_missing_gradient: Literal["error", "zero"]
    gradient_deadline: float
    recompute: bool
    on_loop: bool
    device: Any
    name: str | None


class AnyOptions(PlainOptions, total=False):
    """All options: those that are not plain change the signature."""

    rows: bool
    devices: Sequence[Any]
    ragged: Sequence[str]
    pass_mask: str | None
    pass_rows: str | None
    pass_lengths: str | Mapping[str, str] | None


class AwaitableCalls(Protocol[P, R]):
    """The calls of a batcher for tasks of an event loop; `async_calls.AsyncCalls` has them."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """As `Batcher.__call__`."""

    @overload
    async def call(
        self, *args: Any, deadline: float | None = None, priority: Literal["high", "low"] | None = None,
        caller: str | None = None, receipt: Literal[False] = False, **kwargs: Any,
    ) -> R: ...  # fmt: skip
    @overload
    async def call(
        self, *args: Any, deadline: float | None = None, priority: Literal["high", "low"] | None = None,
        caller: str | None = None, receipt: Literal[True], **kwargs: Any,
    ) -> tuple[R, Receipt]: ...  # fmt: skip

    def stream(
        self, *args: Any, deadline: float | None = None, priority: Literal["high", "low"] | None = None,
        caller: str | None = None, **kwargs: Any,
    ) -> AsyncStream[R]:  # fmt: skip
        """As `Batcher.stream`: an asynchronous iterator."""

    async def vjp(self, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Callable[[Any], Awaitable[Any]]]:
        """As `Batcher.vjp`; the pull-back is awaited too."""

    async def join(self) -> None:
        """As `Batcher.join`."""
