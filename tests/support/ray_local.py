"""A deployment without Ray: the keeper and the replicas run in threads of the test's own process."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager

from weft.batching.options import Options
from weft.ray import connect
from weft.ray.client import Description, client_of
from weft.ray.connect import Peer
from weft.ray.handle import RemoteBatcher
from weft.ray.handshake import Secret
from weft.ray.keeper import Keeper
from weft.ray.replica import Replica

SECRET = Secret(b"s" * 32)


def peer_of(server, **changes):
    """The server as a client expects it."""
    return Peer("the server", server.id, server.addresses, SECRET)._replace(**changes)


def greet(sock, peer):
    """The client's side of the handshake on a socket."""
    connect._greet(sock, peer, time.monotonic() + 20)


class Local:
    """The parts of a deployment. `kill` ends a replica as if its process had died."""

    def __init__(self, make, replicas, optimizer, lease, checkpoint, options):
        self._make, self._options, self._lease = make, options, lease
        checked = Options.of(options)
        self.keeper = Keeper(SECRET, "net", optimizer, checkpoint, checked.gradient_deadline, self.kill)
        self.killed = []
        server = self.keeper.serve("127.0.0.1")
        self.replicas = {}
        self.handle = RemoteBatcher(
            Description(
                secrets.token_hex(8),
                "net",
                SECRET,
                server.addresses,
                server.id,
                replicas,
                checked.max_batch_size,
                checked.parallel,
                checked.fills_to > 1,
                checked.rows,
                checked.wait_backward,
                checked.deadline,
                checked.gradient_deadline,
            )
        )

        try:
            for index in range(replicas):
                self.start(index)
        except BaseException:
            self.stop()
            raise

    def start(self, index, tcp_only=False):
        replica = self.replicas[index] = Replica(self._make(), self._options, self._lease)
        server = replica.serve(SECRET, "127.0.0.1")
        self.keeper.add(index, [server.tcp] if tcp_only else server.addresses, os.getpid(), server.id)
        return replica

    def kill(self, index):
        self.killed.append(index)
        self.replicas.pop(index).server.stop()

    def stop(self):
        self.keeper._closed = True
        client = client_of(self.handle._description)
        client.close()
        client.disconnect()
        for replica in self.replicas.values():
            replica.batcher.close(drain=False)
            replica.server.stop()
        self.keeper.server.stop()
        for member in list(self.keeper.members.values()):
            member.link.close()


@contextmanager
def local(make, replicas=1, optimizer=None, lease=600.0, checkpoint=None, **options):
    """A deployment for the length of a block."""
    deployment = Local(make, replicas, optimizer, lease, checkpoint, options)
    try:
        yield deployment
    finally:
        deployment.stop()
