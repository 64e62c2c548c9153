"""`weft.batched`: makes a `Batcher` of a function, with the function's own signature for type checkers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from .batcher import Batcher
from .lengths import Pad
from .options import Options, refuse_unknown, warn_of_seconds
from .signatures import AnyOptions, PlainOptions

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """Makes a batcher of a function; the results of an async function, and the chunks of one that yields, are what callers get."""

    @overload
    def __call__(self, f: Callable[P, Coroutine[Any, Any, R]], /) -> Batcher[P, R]: ...
    @overload
    def __call__(self, f: Callable[P, Iterator[R]], /) -> Batcher[P, R]: ...
    @overload
    def __call__(self, f: Callable[P, AsyncIterator[R]], /) -> Batcher[P, R]: ...
    @overload
    def __call__(self, f: Callable[P, R], /) -> Batcher[P, R]: ...


@overload
def batched(f: Callable[P, Coroutine[Any, Any, R]], /, **options: Unpack[PlainOptions]) -> Batcher[P, R]: ...
@overload
def batched(f: Callable[P, Iterator[R]], /, **options: Unpack[PlainOptions]) -> Batcher[P, R]: ...
@overload
def batched(f: Callable[P, AsyncIterator[R]], /, **options: Unpack[PlainOptions]) -> Batcher[P, R]: ...
@overload
def batched(f: Callable[P, R], /, **options: Unpack[PlainOptions]) -> Batcher[P, R]: ...
@overload
def batched(f: Callable[..., Any], /, **options: Unpack[AnyOptions]) -> Batcher[..., Any]: ...
@overload
def batched(f: Sequence[Callable[..., Any]], /, **options: Unpack[AnyOptions]) -> Batcher[..., Any]: ...
@overload
def batched(**options: Unpack[PlainOptions]) -> Decorator: ...
@overload
def batched(**options: Unpack[AnyOptions]) -> Callable[[Callable[..., Any]], Batcher[..., Any]]: ...
def batched(
    f: Any = None,
    /,
    *,
    max_batch_size: int | None = None,
    max_wait: float = 0.0,
    min_batch_size: int | None = None,
    max_queue: float | None = None,
    deadline: float | None = None,
    parallel: int = 1,
    split: bool = False,
    allowed_batch_sizes: Sequence[int] | None = (),
    rows: bool = True,
    key: Callable[..., Hashable] | None = None,
    cost: Callable[..., int] | None = None,
    shared: Sequence[str] = (),
    items: Sequence[str] = (),
    pad: Mapping[str, Pad] | None = None,
    cut: Any = None,
    max_waste: float | None = None,
    ragged: Sequence[str] = (),
    vjp: Callable[..., tuple[Any, Callable[..., Any]]] | None = None,
    pass_mask: str | None = None,
    pass_rows: str | None = None,
    pass_lengths: str | Mapping[str, str] | None = None,
    on_error: Literal["isolate", "share"] = "isolate",
    wait_backward: bool = True,
    on_missing_gradient: Literal["error", "zero"] = "error",
    gradient_deadline: float = 60.0,
    recompute: bool = False,
    on_loop: bool = False,
    device: Any = None,
    devices: Sequence[Any] = (),
    name: str | None = None,
    **unknown: Any,
) -> Any:
    """Return a `Batcher` of `f`; without `f`, a decorator that makes one.

    `f` takes arrays with a first dimension of rows, in any nesting, and returns such arrays. Callers pass rows of their own and get
    their rows of the result. Calls that come while a batch runs share the next batch. `f` may be an async function: its
    coroutines run in an event loop of the batcher. If `f` yields, callers iterate over `stream(...)`.

    - `max_batch_size`: the largest number of rows in a batch; None is the last of `allowed_batch_sizes`, or 64.
    - `max_wait`: the longest time in seconds that a batch waits for `min_batch_size`, from its first call on.
    - `min_batch_size`: the number of rows that a batch waits for; None is `max_batch_size` if `max_wait` is positive, else 1.
    - `max_queue`: the number of rows that may wait; further calls get `QueueFullError`. A larger call is taken if no other waits.
    - `deadline`: the longest time in seconds that a call waits before it gets `DeadlineExceededError`.
    - `parallel`: the number of batches that run at once.
    - `split`: split calls with more than `max_batch_size` rows; otherwise they are refused.
    - `allowed_batch_sizes`: pad each batch to the next of these sizes; None and () are any size.
    - `rows`: False if callers pass single examples without a dimension of rows.
    - `key`: a function of the arguments; calls with different keys do not share a batch.
    - `cost`: a function of the arguments; its result counts in place of the number of rows.
    - `shared`: the names of arguments that are not batched and must be equal in all calls of a batch.
    - `items`: the names of arguments that are Python objects, one for each row; `f` gets a list of them.
    - `pad`: a dict from names of arguments to `weft.Pad`: their arrays may differ in length, and are padded to one.
    - `cut`: the results that have the length of a padded argument, and are cut back: True for all, or keys and positions; a dict
      from names of arguments if several are padded.
    - `max_waste`: the largest part of a batch that may be padding, from 0 to 1, not counting what rounding adds: calls of like
      length go together.
    - `ragged`: the names of arguments that `f` gets as a `RaggedTensor`; callers pass arrays of any length, or RaggedTensors.
    - `vjp`: a function like `f` that returns the result and its pull-back, for `Batcher.vjp`.
    - `pass_mask`: the name of a parameter of `f` that gets an array with True for each row of a caller and False for padding.
    - `pass_rows`: the name of a parameter of `f` that gets the number of rows without padding.
    - `pass_lengths`: the name of a parameter of `f` that gets the length of each row of the padded argument; a dict from names of
      arguments if several are padded.
    - `on_error`: "isolate" runs a failed batch again in parts, so that only the calls at fault fail; "share" gives all calls the
      error, for functions that must not run twice.
    - `wait_backward`: whether `backward()` waits until the batch's backward has run.
    - `on_missing_gradient`: if a caller's gradient does not come, "error" raises in the others, "zero" goes on with zeros.
    - `gradient_deadline`: the longest time in seconds that a batch waits for gradients, from the first one on.
    - `recompute`: compute the activations again in the backward, in place of storing them.
    - `on_loop`: run the batches of tasks in their event loop, not in a worker thread: for functions that take microseconds and
      never block. While `f` runs, the event loop does nothing else.
    - `device`: the PyTorch device that `f` runs on; rows are moved there, and results back to the callers' device or NumPy.
    - `devices`: one device for each of a list of functions, such as copies of a model; one batch runs on each at a time.
    - `name`: the batcher's name in errors and for observers; the default is the name of `f`.

    >>> import numpy as np
    >>> @batched(max_batch_size=64)
    ... def double(x):
    ...     return x * 2
    >>> double(np.arange(3.0))
    array([0., 2., 4.])
    """
    options = Options(
        max_batch_size=max_batch_size, max_wait=max_wait, min_batch_size=min_batch_size, max_queue=max_queue,  # type: ignore[arg-type]
        deadline=deadline, parallel=parallel, split=split, allowed_batch_sizes=allowed_batch_sizes, rows=rows, key=key,
        cost=cost, shared=shared, items=items, pad=pad, cut=cut, max_waste=max_waste, ragged=ragged, vjp=vjp,
        pass_mask=pass_mask, pass_rows=pass_rows, pass_lengths=pass_lengths, on_error=on_error,
        wait_backward=wait_backward, on_missing_gradient=on_missing_gradient, gradient_deadline=gradient_deadline,
        recompute=recompute, on_loop=on_loop, device=device, devices=devices, name=name,
    )  # fmt: skip
    refuse_unknown(unknown)
    warn_of_seconds({"max_wait": max_wait})
    return partial(Batcher, options=options) if f is None else Batcher(f, options)
