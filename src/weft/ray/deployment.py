"""`weft.ray.deploy`: starts a keeper and replicas on Ray, and returns a handle."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..batching.options import Options, in_seconds, positive
from ..errors import FailedPreconditionError, InvalidArgumentError, OpError, UnavailableError, UnknownError
from .actors import KeeperActor
from .client import Description
from .handle import RemoteBatcher, keepers
from .handshake import Secret


def deploy(
    make: Callable[[], Callable[..., Any]],
    *,
    replicas: int = 1,
    optimizer: Callable[..., Any] | None = None,
    ray_options: dict[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    result_lease: float = 600.0,
    start_timeout: float = 300.0,
    network: bool | None = None,
    name: str | None = None,
    **options: Any,
) -> RemoteBatcher:
    """Start replicas of a model on Ray, and return the handle by which any process calls them.

    - `make`: a function without arguments that returns the model; it runs on each replica. All replicas begin with the weights of
      the first one.
    - `replicas`: their number. Ray starts a replica that has died again.
    - `optimizer`: a function of the parameters that returns an optimizer, for `step()`.
    - `ray_options`: options of the replicas' actors, such as `num_cpus` (1) and `num_gpus`.
    - `checkpoint`: a file for the weights and the optimizer's state after every step; they are taken from it if it is there.
    - `result_lease`: how long in seconds a replica keeps a result that no gradient comes for.
    - `start_timeout`: how long to wait for the replicas, in seconds.
    - `network`: whether processes of other machines can call. By default they can if the cluster has several machines now; else
      everything listens on Unix sockets and 127.0.0.1 only. True where machines join later, or where processes outside call.
    - `name`: the deployment's name in errors.
    - `options`: those of `weft.batched`.
    """
    name, count = _check(make, replicas, optimizer, name)
    if network is not None and not isinstance(network, bool):
        raise InvalidArgumentError(f"network must be True, False or None, got {network!r}")
    checked = Options.of(options)
    model, update = pickled((make, in_seconds(options)), optimizer)
    secret = Secret.new()
    file = None if checkpoint is None else str(Path(checkpoint).absolute())
    lease, seconds = positive("result_lease", result_lease), positive("start_timeout", start_timeout)
    # The keeper ends with this process, so it belongs on its node: no other node's loss should end the deployment. An actor that
    # needs nothing is given to a node by chance, which may not know this one yet; one byte of memory makes Ray ask this node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(KeeperActor).options(num_cpus=0, memory=1, max_concurrency=16, scheduling_strategy=here)
    keeper = actor.remote(name, secret, update, file, checked.gradient_deadline, network)
    try:
        starting = keeper.start.remote(count, model, lease, dict(ray_options or {}), seconds)
        addresses, keeper_id, version = _get(starting, seconds + 60, name)
    except BaseException:
        ray.kill(keeper)
        raise
    description = Description(
        secrets.token_hex(16), name, secret, addresses, keeper_id, count, checked.max_batch_size, checked.parallel,
        checked.fills_to > 1, checked.rows, checked.wait_backward, checked.deadline, checked.gradient_deadline, version,
    )  # fmt: skip
    keepers[description.deployment] = keeper
    return RemoteBatcher(description)


def _check(make: Any, replicas: Any, optimizer: Any, name: str | None) -> tuple[str, int]:
    if not ray.is_initialized():
        raise FailedPreconditionError("weft.ray.deploy needs a running Ray: call ray.init() first")
    check_make(make)
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise InvalidArgumentError(f"replicas must be a positive integer, got {replicas!r}")
    if optimizer is not None and not callable(optimizer):
        raise InvalidArgumentError(f"optimizer must be a function of the parameters, got {optimizer!r}")
    return name or str(getattr(make, "__qualname__", type(make).__name__)), replicas


def check_make(make: Any) -> None:
    """Refuse what is no function that makes the model."""
    if not callable(make) or (hasattr(make, "state_dict") and not isinstance(make, type)):
        raise InvalidArgumentError(
            f"make must be a function without arguments that returns the model, got {type(make).__name__}: pass "
            "lambda: model, or better a function that makes it"
        )


def pickled(*parts: Any) -> list[bytes]:
    """Return what is sent to replicas as bytes."""
    try:
        return [ray.cloudpickle.dumps(part) for part in parts]
    except Exception as error:
        raise InvalidArgumentError(
            f"make, optimizer and the options must be picklable, got {type(error).__name__}: {error}. Create what cannot be "
            "pickled inside make(), which runs on each replica"
        ) from error


def _get(ref: Any, seconds: float, name: str) -> Any:
    """Return the result of an actor's method; raise errors of weft as they are, and others with one sentence."""
    try:
        return ray.get(ref, timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, OpError) else UnknownError(str(error.cause))
        raise type(cause)(str(cause)) from None
    except ray.exceptions.GetTimeoutError:
        raise UnavailableError(f"the keeper of {name} did not answer within {seconds:g} s") from None
    except ray.exceptions.RayActorError as error:
        raise UnavailableError(f"the keeper of {name} has died: {error}") from None
