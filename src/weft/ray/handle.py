"""`RemoteBatcher`: the handle of a deployment. It is called like the deployed model, from any process that holds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import msgspec

from ..batching.options import warn_of_seconds
from ..batching.statistics import Statistics, Times
from ..errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError, OpError, UnavailableError
from .calls import PLAIN, CallOptions, RemoteCall
from .client import Client, Description, Remote, client_of
from .invocation import GRACE_SECONDS
from .link import Link
from .loop_link import LoopLink, LoopPending
from .requests import Pending
from .streams import AsyncRemoteStream, RemoteStream

#: The keepers' actors of the deployments that this process has made and not closed: an actor without a handle is ended by Ray.
keepers: dict[str, Any] = {}

#: How long `close` waits for calls that are under way.
CLOSE_SECONDS = 60.0


class RemoteBatcher:
    """The handle of a deployment: call it like the model, with rows of your own. `weft.ray.deploy` makes one.

    It is small and can be pickled. It works in every process that can reach the replicas, in threads and in event loops.
    """

    def __init__(self, description: Description) -> None:
        self._description = description

    @property
    def _client(self) -> Client:
        return client_of(self._description)

    @property
    def name(self) -> str:
        """The name of the deployment."""
        return self._description.name

    @property
    def version(self) -> int:
        """The version of the weights, as far as this process has heard: from answers to it, or with the handle."""
        return max(self._client.version, self._description.version)

    def __reduce__(self) -> Any:
        return _from_bytes, (msgspec.structs.replace(self._description, version=self.version).to_bytes(),)

    def __repr__(self) -> str:
        count = self._description.replicas
        return f"<weft.ray.RemoteBatcher {self.name}: {count} {'replica' if count == 1 else 'replicas'}>"

    # --- calls ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs, PLAIN)

    def call(
        self, *args: Any, deadline: float | None = None, priority: str | None = None, caller: str | None = None,
        receipt: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As `weft.Batcher.call`; the receipt also has the `version` of the weights that made the result."""
        return self._call(args, kwargs, CallOptions(deadline, priority, caller, receipt))

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], Any]]:
        """As `weft.Batcher.vjp`: return the result and its pull-back. The deployment must have the option `vjp`."""
        result, invocation = self._call(args, kwargs, CallOptions(is_vjp=True))
        return result, _PullBack(invocation, self.name)

    def stream(
        self,
        *args: Any,
        deadline: float | None = None,
        priority: str | None = None,
        caller: str | None = None,
        **kwargs: Any,
    ) -> RemoteStream:
        """As `weft.Batcher.stream`: iterate over this caller's rows of what a streaming model yields."""
        call = RemoteCall(self._client, args, kwargs, CallOptions(deadline, priority, caller, is_stream=True))
        remote, link, pending = self._send(call)
        return RemoteStream(pending, lambda frame: call.result(remote, link, frame, False))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        call = RemoteCall(self._client, args, kwargs, options)
        while True:
            remote, link, pending = self._send(call)
            try:
                frame = link.wait(pending, call.until)
                break
            except UnavailableError as error:
                call.after_loss(remote, link, error)
            finally:
                call.over(remote, pending)
        link.settle()
        return call.result(remote, link, frame, False)

    def _send(self, call: RemoteCall) -> tuple[Remote, Link, Pending]:
        """Send a call to a replica that is there."""
        client = self._client
        may_connect = True
        while True:
            remote = client.choose(call.rows, call.end, may_connect)
            is_new = remote.link is None and client.has_choice
            try:
                link = client.link(remote, call.end)
                if link is not None and not is_new:
                    link.check()
                    pending = call.send(link)
                    call.begun(remote)
                    return remote, link, pending
                # It has told now how busy it is, or it takes long: another one may be there sooner.
                call.check_time()
                may_connect = False
            except UnavailableError as error:
                call.after_no_send(remote, error)
                may_connect = True

    @property
    def aio(self) -> RemoteCalls:
        """The same calls for tasks of an event loop: `await policy.aio(x)`, and `call`, `vjp`, `join` in the same way."""
        return RemoteCalls(self)

    def join(self) -> None:
        """Wait until the gradients that this process has handed in without waiting have gone back; raise the first error."""
        client = self._client
        until = time.monotonic() + client.description.gradient_deadline + GRACE_SECONDS
        for pending in list(client.outstanding):
            link = pending.link
            if not isinstance(link, Link):
                continue
            if not pending.done:
                try:
                    link.wait(pending, until)
                except Exception:
                    if not pending.done:
                        client.outstanding.pop(pending, None)
                        raise
            link.settle()
            while pending in client.outstanding and time.monotonic() < until:  # another thread adds its gradients
                time.sleep(0.0005)
                link.settle()
        self._raise_failed()

    def _raise_failed(self) -> None:
        client = self._client
        failed = list(client.failed)
        client.failed.clear()
        if failed:
            if len(failed) > 1:
                failed[0].add_note(f"{len(failed) - 1} more backwards failed")
            raise failed[0]

    # --- weights ---

    def step(self, *, version: int | None = None, allow_lost: bool = False) -> int:
        """Apply the sum of all replicas' gradients, once, on all replicas or on none; return the new version.

        Batches that hold a gradient go back first. With `version`, which the step is to make, nothing happens if it is there
        already: a step can be tried again. If a replica that held gradients has died, the step is refused unless `allow_lost`.
        """
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise InvalidArgumentError(f"version must be an integer, got {version!r}")
        if not self._description.wait_backward:
            self.join()
        client = self._client
        seconds = 2 * client.description.gradient_deadline + 300.0
        found, _ = client.ask_keeper("step", [version, bool(allow_lost)], seconds=seconds)
        return int(found)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the last step, as CPU tensors by the keys of the model's own state dict."""
        names, arrays = self._client.ask_keeper("state_dict", seconds=300.0)
        return dict(zip(names, arrays, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Give all replicas these weights; gradients that they hold are dropped. Return the new version."""
        if not isinstance(state, dict):
            raise InvalidArgumentError(f"state must be a dict of tensors, got a {type(state).__name__}")
        arrays = [x.detach() if hasattr(x, "detach") else x for x in state.values()]
        found, _ = self._client.ask_keeper("load_state_dict", list(state), arrays, seconds=600.0)
        return int(found)

    # --- everything else ---

    def statistics(self, *, per_replica: bool = False, **options: Any) -> Any:
        """Return the figures of all replicas together, or with `per_replica` a list of each one's; options as for a batcher."""
        found, _ = self._client.ask_keeper("statistics", options, seconds=60.0)
        each = [_statistics(figures) for figures in found]
        return each if per_replica else merge(each)

    def update(self, **changes: Any) -> None:
        """Change options of all replicas while they run, as `weft.Batcher.update`; bad values are refused and change nothing."""
        if any(isinstance(value, tuple) for value in changes.values()):
            changes = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
        client = self._client
        client.ask_keeper("update", changes, seconds=60.0)
        client.change(changes)
        warn_of_seconds(changes)

    def close(self, *, drain: bool = True, timeout: float = CLOSE_SECONDS) -> None:
        """Refuse new calls, answer those that wait, or with `drain=False` cancel them, and end the replicas."""
        client = self._client
        if client.closed is not None:
            return
        try:
            with suppress(UnavailableError):
                client.ask_keeper("close", [drain, timeout], seconds=timeout + 10.0)
        finally:
            with suppress(OpError):  # the keeper ends before it answers
                client.ask_keeper("end", seconds=30.0)
            client.close()
            client.disconnect()
            keepers.pop(self._description.deployment, None)

    def __enter__(self) -> RemoteBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteCalls:
    """The calls of a handle, awaitable."""

    def __init__(self, handle: RemoteBatcher) -> None:
        self._handle = handle

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return await self._call(args, kwargs, PLAIN)

    async def call(
        self, *args: Any, deadline: float | None = None, priority: str | None = None, caller: str | None = None,
        receipt: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As `RemoteBatcher.call`."""
        return await self._call(args, kwargs, CallOptions(deadline, priority, caller, receipt))

    async def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], Awaitable[Any]]]:
        """As `RemoteBatcher.vjp`; the pull-back is awaited, too."""
        result, invocation = await self._call(args, kwargs, CallOptions(is_vjp=True))
        return result, _AsyncPullBack(invocation, self._handle.name)

    def stream(
        self,
        *args: Any,
        deadline: float | None = None,
        priority: str | None = None,
        caller: str | None = None,
        **kwargs: Any,
    ) -> AsyncRemoteStream:
        """As `RemoteBatcher.stream`: an asynchronous iterator."""
        call = RemoteCall(self._handle._client, args, kwargs, CallOptions(deadline, priority, caller, is_stream=True))

        async def send() -> tuple[Any, Any]:
            remote, link, pending = await self._send(call)
            return pending, lambda frame: call.result(remote, link, frame, True)

        return AsyncRemoteStream(send)

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        call = RemoteCall(self._handle._client, args, kwargs, options)
        while True:
            remote, link, pending = await self._send(call)
            try:
                frame = await pending.wait(call.until)
                break
            except UnavailableError as error:
                call.after_loss(remote, link, error)
            finally:
                call.over(remote, pending)
        return call.result(remote, link, frame, True)

    async def _send(self, call: RemoteCall) -> tuple[Remote, LoopLink, Any]:
        client = self._handle._client
        may_connect = True
        while True:
            remote = await client.choose_in_loop(call.rows, call.end, may_connect)
            is_new = asyncio.get_running_loop() not in remote.loop_links and client.has_choice
            try:
                link = await client.loop_link(remote, call.end)
                if link is not None and not is_new:
                    pending = call.send(link)
                    call.begun(remote)
                    return remote, link, pending
                call.check_time()
                may_connect = False
            except UnavailableError as error:
                call.after_no_send(remote, error)
                may_connect = True

    async def join(self) -> None:
        """As `RemoteBatcher.join`."""
        client = self._handle._client
        while True:
            waiting = [each for each in list(client.outstanding) if isinstance(each, LoopPending) and each.is_here]
            if not waiting:
                break
            for pending in waiting:
                try:
                    async with asyncio.timeout(client.description.gradient_deadline + GRACE_SECONDS):
                        await pending.join()
                except TimeoutError:
                    client.outstanding.pop(pending, None)
                    raise DeadlineExceededError("a gradient that was handed in got no answer") from None
        await asyncio.get_running_loop().run_in_executor(None, self._handle.join)


class _PullBack:
    """Takes the gradient of a result to the gradients of its arrays."""

    def __init__(self, invocation: Any, name: str) -> None:
        if invocation is None:
            raise FailedPreconditionError(f"{name} has no pull-back: deploy it with vjp=")
        self._invocation = invocation

    def __call__(self, gradient: Any) -> Any:
        pending = self._invocation.send_tree(gradient)
        self._invocation.wait(pending)
        return self._invocation.tree_answer(pending)


class _AsyncPullBack(_PullBack):
    """As `_PullBack`, for tasks."""

    async def __call__(self, gradient: Any) -> Any:
        pending = self._invocation.send_tree(gradient)
        await pending.wait(self._invocation.until)
        return self._invocation.tree_answer(pending)


def _from_bytes(data: bytes) -> RemoteBatcher:
    return RemoteBatcher(Description.from_bytes(data))


def _statistics(figures: dict[str, Any]) -> Statistics:
    """Return the statistics that a replica sent as a dict."""
    for name, value in figures.items():
        if isinstance(value, dict) and "_buckets" in value:
            figures[name] = Times(**value | {"_buckets": tuple(value["_buckets"])})
    return Statistics(**figures)


def merge(each: list[Statistics]) -> Statistics:
    """Return the figures of several batchers together."""
    if not each:
        raise UnavailableError("no replica is alive now")
    merged = {field.name: _merge([getattr(one, field.name) for one in each]) for field in fields(Statistics)}
    return Statistics(**merged | {"seconds": max(one.seconds for one in each)})


def _merge(figures: list[Any]) -> Any:
    first = figures[0]
    if isinstance(first, Times):
        buckets = tuple(map(sum, zip(*(each._buckets for each in figures), strict=True)))
        longest = max(each.longest for each in figures)
        return Times(sum(each.count for each in figures), sum(each.total for each in figures), longest, buckets)
    if isinstance(first, dict):
        keys = sorted({key for each in figures for key in each})
        return {key: sum(each.get(key, 0) for each in figures) for key in keys}
    return sum(figures)
