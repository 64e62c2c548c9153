"""The Ray actors of a deployment: a keeper, and the replicas that it starts. Ray starts a replica that has died again."""

from __future__ import annotations

import logging
import os
import time
import traceback
from typing import Any

import ray

from .. import errors
from ..core.interrupts import call_user
from ..errors import OpError, UnavailableError, UnknownError
from .handshake import Secret
from .keeper import Keeper
from .replica import Replica

#: What replicas are started with unless `ray_options` says otherwise.
REPLICA_OPTIONS = {"num_cpus": 1, "max_restarts": -1, "max_concurrency": 4}
#: How long a replica that was started again and cannot answer waits before it ends, to be started once more.
RETRY_SECONDS = 1.0

log = logging.getLogger("weft.ray")


def host(network: bool | None) -> str:
    """Return where this process listens by TCP: at its node's address if `network`, or by default if there are other machines."""
    here = str(ray.util.get_node_ip_address())
    if network is None:
        network = any(node["Alive"] and node["NodeManagerAddress"] != here for node in ray.nodes())
    return here if network else "127.0.0.1"


class ReplicaActor:
    """Makes the model, answers calls over its own socket, and tells the keeper where."""

    def __init__(
        self, index: int, pickled: bytes, result_lease: float, secret: Secret, keeper: Any, network: bool | None
    ) -> None:
        self._problem: tuple[str, str] | None = None
        try:
            make, options = ray.cloudpickle.loads(pickled)
            self._replica = Replica(call_user(make), options, result_lease)
            # A replica that the keeper has given up serves old weights: Ray starts it again, with those of the last step.
            self._replica.on_orphaned = lambda: os._exit(1)
            server = self._replica.serve(secret, host(network))
            ray.get(keeper.add.remote(index, server.addresses, os.getpid(), server.id))
        except Exception as error:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                # Ray gives an actor up whose constructor raises, and starts one again whose process ends.
                log.exception("replica %d cannot be started again now", index)
                time.sleep(RETRY_SECONDS)
                os._exit(1)
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            self._problem = type(cause).__name__, f"{cause}\n{traceback.format_exc()}"

    def problem(self) -> tuple[str, str] | None:
        """Return the class and the text of the error that keeps this replica from answering, None if there is none."""
        return self._problem


class KeeperActor:
    """Runs a `Keeper`, and starts and kills replicas."""

    def __init__(
        self,
        name: str,
        secret: Secret,
        pickled: bytes,
        checkpoint: str | None,
        gradient_deadline: float,
        network: bool | None,
    ) -> None:
        self._name, self._secret, self._network = name, secret, network
        optimizer = ray.cloudpickle.loads(pickled)
        self._keeper = Keeper(secret, name, optimizer, checkpoint, gradient_deadline, self._kill)
        self._keeper.on_end = self._end
        self._replicas: dict[int, Any] = {}
        self._me = ray.get_runtime_context().current_actor

    def start(
        self, count: int, pickled: bytes, result_lease: float, ray_options: dict[str, Any], seconds: float
    ) -> tuple[list[Any], str, int]:
        """Start the replicas; when they are ready return where the keeper answers, its id, and the version of the weights."""
        actor = ray.remote(ReplicaActor).options(**REPLICA_OPTIONS | ray_options)
        for index in range(count):
            self._replicas[index] = actor.remote(index, pickled, result_lease, self._secret, self._me, self._network)
        asked = {replica.problem.remote(): index for index, replica in self._replicas.items()}
        done, waiting = ray.wait(list(asked), num_returns=count, timeout=seconds)
        for ref in done:
            problem = ray.get(ref)
            if problem is not None:
                found = getattr(errors, problem[0], None)
                kind = found if isinstance(found, type) and issubclass(found, OpError) else UnknownError
                raise kind(f"replica {asked[ref]} of {self._name} could not start: {problem[0]}: {problem[1]}")
        if waiting:
            raise UnavailableError(
                f"{len(waiting)} of {count} replicas of {self._name} did not start within {seconds:g} s: each asks for "
                f"{ {**REPLICA_OPTIONS, **ray_options} }, and the cluster has {ray.available_resources()} left"
            )
        # Only now: the replicas may have made the cluster grow.
        server = self._keeper.serve(host(self._network))
        return server.addresses, server.id, self._keeper.version

    def pid(self) -> int:
        """Return the id of the keeper's process."""
        return os.getpid()

    def add(self, index: int, addresses: list[Any], pid: int, id: str) -> None:
        """Take in a replica that has started."""
        self._keeper.add(index, addresses, pid, id)

    def _kill(self, index: int) -> None:
        ray.kill(self._replicas[index], no_restart=False)

    def _end(self) -> None:
        for replica in self._replicas.values():
            ray.kill(replica)
        self._me.leave.remote()

    def leave(self) -> None:
        ray.actor.exit_actor()
