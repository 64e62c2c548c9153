"""The handshake: both ends of a connection prove that they know a secret, which never travels. Bytes in, bytes out; no sockets.

Three messages open a connection; after them the server says welcome in its own protocol:

    client -> server   hello:      format, nonce of the client, what the client is
    server -> client   challenge:  format, nonce of the server, proof of the server, what the server is
    client -> server   proof:      proof of the client

"What it is" is a short text, such as a version, that the handshake carries and does not read. A proof is HMAC-SHA256, keyed with
the secret, over the role of the side that proves ("client" or "server"), the server's id, and all that both sides said: formats,
nonces and texts, each with its length before it. The id is random, is made when the server starts, and comes to the client
together with the address, from a place it trusts. The server proves first: whoever listens at an address gets a nonce from a
client that it cannot convince, and nothing else. Proofs are compared by `hmac.compare_digest`. What this is good against:

- **Who reads along** sees nonces and proofs. The secret has at least 16 random bytes, so that it cannot be guessed from them.
- **A stranger who took the name or port of a server that died** cannot make the server's proof. It cannot fetch one from another
  server either: that one proves its own id, and the client expects the id of the dead one. The same holds for two servers of one
  deployment that have exchanged their addresses.
- **Reflection**: what a client sent, sent back to it, or to a connection opened the other way round, proves nothing: the role is
  part of each proof, and a process that is a client here and a server there (a keeper, a replica) never makes a proof of the
  other role.
- **Replay**: both sides choose a new nonce of 32 bytes for each connection, and each proof covers both. What was recorded fits
  no other connection.
- **Role confusion and moved borders**: each part of what is proved has its length before it, so that no two conversations give
  the same bytes.
- **Downgrade**: there is one format and nothing to negotiate. Another format is refused; the texts of both sides are proved, so
  nobody on the way can have made a side take another version than the real one.

What it is not good against: **a relay on the path**. Who can pass on and change the bytes between two honest sides lets the
handshake through and then has the connection: nothing is encrypted, and no later byte is proved. Use networks that you trust, or
put TLS around the connection. Whoever has the secret is trusted, as a client and as any server whose id it can learn.

Neither class ever says why the other side failed to convince it: the caller closes the connection, and sets the time limit and
the number of connections that may be in this state.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

from ..errors import InvalidArgumentError, UnavailableError

#: The first byte of a hello and of a challenge.
FORMAT = 1
#: Bytes of a nonce, and of a proof.
NONCE, PROOF = 32, hashlib.sha256().digest_size
#: The longest text of a side, in bytes, and the shortest secret.
MOST_TEXT, LEAST_SECRET = 255, 16


class Secret:
    """What all processes of a deployment know and nobody else. It shows its bytes to nobody who prints it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes) or len(key) < LEAST_SECRET:
            raise InvalidArgumentError(
                f"a secret must be at least {LEAST_SECRET} random bytes: make one by Secret.new()"
            )
        self._key = key

    @classmethod
    def new(cls) -> Secret:
        """Return a new random secret."""
        return cls(secrets.token_bytes(32))

    def __repr__(self) -> str:
        return "<a secret>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __reduce__(self) -> Any:
        return Secret, (self._key,)

    def reveal(self) -> bytes:
        """Return the bytes, for the pickled form of a handle."""
        return self._key

    def proof(self, role: bytes, *parts: bytes) -> bytes:
        """Return the proof of a role over what was said."""
        found = hmac.new(self._key, b"weft handshake", hashlib.sha256)
        for part in (role, *parts):
            found.update(len(part).to_bytes(4, "big") + part)
        return found.digest()


class ClientHandshake:
    """The client's side, for one connection: send `hello`, give `answer` what comes back, and send what it returns."""

    def __init__(self, secret: Secret, server_id: str, text: str) -> None:
        self._secret, self._id = secret, server_id.encode()
        self.hello = _opening(text)
        self.server_text = ""  # what the server is, once it has proved itself

    def answer(self, challenge: bytes) -> bytes:
        """Return the client's proof if the server has proved itself; else raise `UnavailableError`."""
        nonce, rest = _opened(challenge)
        proof, text = rest[:PROOF], rest[PROOF:]
        said = self._id, self.hello, nonce, text
        if not hmac.compare_digest(self._secret.proof(b"server", *said), proof):
            raise UnavailableError(
                "what answers there does not prove that it knows the secret of this deployment and is the server that is meant"
            )
        self.server_text = _text(text)
        return self._secret.proof(b"client", *said)


class ServerHandshake:
    """The server's side, for one connection: answer the hello with `challenge`, and give `check` what comes back."""

    def __init__(self, secret: Secret, server_id: str, text: str) -> None:
        self._secret, self._id = secret, server_id.encode()
        self._opening = _opening(text)
        self._said: tuple[bytes, ...] | None = None
        self.client_text = ""  # what the client is, once it has proved itself

    def challenge(self, hello: bytes) -> bytes:
        """Return the answer to a hello; raise `UnavailableError` if it is none, or a second one."""
        if self._said is not None:
            raise UnavailableError("a connection begins with one hello")
        _opened(hello)
        nonce, text = _opened(self._opening)
        self._said = self._id, hello, nonce, text
        return self._opening[: 1 + NONCE] + self._secret.proof(b"server", *self._said) + text

    def check(self, proof: bytes) -> None:
        """Return if the client has proved itself; else raise `UnavailableError`."""
        said = self._said
        if said is None or not hmac.compare_digest(self._secret.proof(b"client", *said), proof):
            raise UnavailableError("the other side does not prove that it knows the secret of this deployment")
        self.client_text = _text(_opened(said[1])[1])


def _opening(text: str) -> bytes:
    """Return a side's first message without a proof: the format, a new nonce and the side's text."""
    encoded = text.encode()
    if len(encoded) > MOST_TEXT:
        raise InvalidArgumentError(f"what a side is takes at most {MOST_TEXT} bytes, got {len(encoded)}")
    return bytes([FORMAT]) + secrets.token_bytes(NONCE) + encoded


def _opened(message: bytes) -> tuple[bytes, bytes]:
    """Return the nonce of a first message and what follows; raise `UnavailableError` if it is none of this format."""
    if not 1 + NONCE <= len(message) <= 1 + NONCE + PROOF + MOST_TEXT or message[0] != FORMAT:
        raise UnavailableError("what came is no message of this handshake")
    return message[1 : 1 + NONCE], message[1 + NONCE :]


def _text(encoded: bytes) -> str:
    return encoded.decode(errors="replace")
