"""What type checkers must know of batched functions. Lines that end in `# error` must be errors, and no others.

`tests/batching/test_types.py` has them checked; nothing here is run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import weft

Floats = NDArray[np.float64]
x: Floats = np.ones(1)


@weft.batched
def bare(x: Floats, scale: float = 1.0) -> Floats:
    return x * scale


@weft.batched(max_batch_size=8, max_wait=0.001)
def decorated(x: Floats, *, name: str) -> dict[str, Floats]:
    return {name: x}


def plain(x: Floats, /, size: int) -> tuple[Floats, int]:
    return x, size


wrapped = weft.batched(plain, split=True, key=lambda x, size: size)
masked = weft.batched(lambda x, mask: x, pass_mask="mask", allowed_batch_sizes=(8, 64))
single = weft.batched(plain, rows=False)


class Model:
    @weft.batched(max_batch_size=4)
    def encode(self, x: Floats, k: int) -> Floats:
        return x * k

    @weft.batched
    def label(self, x: Floats) -> list[str]:
        return weft.PerRow(str(v) for v in x)


@weft.batched(parallel=4)
async def remote(x: Floats) -> dict[str, Floats]:
    return {"y": x}


@weft.batched
def chunks(x: Floats) -> Iterator[tuple[Floats, int]]:
    yield x, 1


@weft.batched(max_batch_size=4)
async def async_chunks(x: Floats) -> AsyncIterator[Floats]:
    yield x


assert_type(bare(x, scale=2.0), Floats)
assert_type(remote(x), dict[str, Floats])
assert_type(list(chunks.stream(x, deadline=1.0)), list[tuple[Floats, int]])
assert_type(next(async_chunks.stream(x)), Floats)
assert_type(decorated(x, name="a"), dict[str, Floats])
assert_type(wrapped(x, 3), tuple[Floats, int])
assert_type(wrapped.call(x, size=3, deadline=1.0), tuple[Floats, int])
assert_type(wrapped.call(x, size=3, receipt=True), tuple[tuple[Floats, int], weft.Receipt])
assert_type(bare.vjp(x), tuple[Floats, Callable[[Any], Any]])
assert_type(masked, weft.Batcher[..., Any])
assert_type(single, weft.Batcher[..., Any])
assert_type(Model().encode(x, 3), Floats)
assert_type(Model().encode.call(x, 3, receipt=True), tuple[Floats, weft.Receipt])
assert_type(Model().label(x), list[str])
assert_type(Model.label(Model(), x), list[str])
assert_type(weft.Shared(3), int)
assert_type(bare.options.max_batch_size, int)
assert_type(bare.statistics(last=60.0), weft.Statistics)
bare.update(max_batch_size=3, max_wait=0.1)


async def tasks() -> None:
    assert_type(await bare.aio(x), Floats)
    assert_type(await wrapped.aio.call(x, 3, receipt=True), tuple[tuple[Floats, int], weft.Receipt])
    assert_type(await Model().encode.aio(x, k=3), Floats)
    async with weft.batched(plain) as policy:
        assert_type(await policy.aio(x, 3), tuple[Floats, int])
    assert_type(await remote.aio(x), dict[str, Floats])
    assert_type([y async for y in chunks.aio.stream(x)], list[tuple[Floats, int]])
    await bare.aclose()
    await bare.aio(x, 2.0, 3.0)  # error
    await Model().encode.aio(x)  # error


bare("text")  # error
bare(x, scal=2.0)  # error
decorated(x)  # error
Model().encode(x)  # error
weft.batched(plain, max_batchsize=3)  # error
weft.batched(plain, max_batch_size="3")  # error
weft.batched(plain, fill="full")  # error
weft.batched(on_error="ignore")  # error
bare.update(max_batchsize=3)  # error
bare.update(split=True)  # error
bare.max_batch_size = 3  # error
