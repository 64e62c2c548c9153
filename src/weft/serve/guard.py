"""Who may do what: the bearer token, the names under which the server answers without one, and the checks of changes."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from ..errors import InvalidArgumentError
from .errors import HttpError
from .http import Exchange

_NAMES = ("localhost", "127.0.0.1", "::1")
#: How many Host headers that were accepted are kept.
KEPT = 256


class Guard:
    """Checks requests against a token, or their Host header while there is none, and the origin of those that change something.

    Without a token every page in a browser of this machine may send requests. That it may not read the answers rests on its origin,
    which is a name: the page's owner can have the name resolve to this machine (DNS rebinding).
    """

    def __init__(self, token: str | None = None, hosts: Sequence[str] = ()) -> None:
        if token is not None and not token.strip():
            raise InvalidArgumentError("the token must not be empty")
        self._token = None if token is None else token.strip().encode()
        self._hosts = {host.lower() for host in hosts}
        self._place: str | None = None  # the address on which the server listens; None if another server runs the app
        self._own: set[str] = set()  # the name on which it listens
        self._accepted: set[bytes] = set()

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def bind(self, host: str) -> None:
        """Note the address on which the server listens."""
        self._place, self._own, self._accepted = host, {host.lower()}, set()

    def check(self, exchange: Exchange) -> None:
        """Refuse a request without the token, if there is one; without one, under a strange name."""
        if self._token is None:
            self.check_host(exchange)
        else:
            self.check_token(exchange)

    def check_host(self, exchange: Exchange) -> None:
        """Refuse a request under a strange name, unless a token protects the server."""
        host = exchange.headers.get(b"host")
        if self._token is not None or host is None or host in self._accepted:  # browsers always send it
            return
        local = exchange.scope.get("server")
        place = self._place if self._place is not None else local and local[0]
        if not self._is_accepted(host.decode("latin-1"), place):
            raise HttpError(
                403, f"without a token, the server does not answer under the name {host.decode('latin-1')[:80]!r}: call it by its "
                "address, or give it the name with --host-name (hosts=)"
            )  # fmt: skip
        if self._place is not None and len(self._accepted) < KEPT:
            self._accepted.add(host)

    def _is_accepted(self, host: str, place: str | None) -> bool:
        """Return whether a Host header is a name of the server, or an address, which no page can have taken for another."""
        name = _name(host)
        if name == "localhost" or name in self._hosts or name in self._own:
            return True
        if self._place is None and not (place and _address(place)):
            return True  # a Unix socket, or no network: no browser gets here
        address = _address(name)
        return address is not None and (address.is_loopback or not _is_local(place))

    def check_token(self, exchange: Exchange) -> None:
        """Refuse a request without the token, if there is one."""
        if self._token is None:
            return
        kind, _, given = exchange.headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            raise HttpError(401, "a bearer token is needed", [(b"www-authenticate", b"Bearer")])

    def check_change(self, exchange: Exchange) -> None:
        """Refuse a request to change something that a foreign page, or a machine without the token, may have sent."""
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        name = _name(host)
        origin = exchange.headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host.lower():
            raise HttpError(403, "this endpoint answers pages of its own origin only")
        if self._token is not None:  # `check` has seen it; the name does not matter then, unless names are given
            if self._hosts and name not in self._hosts:
                raise HttpError(403, f"the Host header must be one of {', '.join(sorted(self._hosts))}")
            return
        if name not in _NAMES and name not in self._hosts:
            raise HttpError(403, "without a token, endpoints that change something answer to localhost alone")
        if not _is_loopback(exchange.scope.get("client")):
            raise HttpError(403, "without a token, endpoints that change something answer this machine alone")


def _name(host: str) -> str:
    """Return the name in a Host header, without the port; empty if it is not one."""
    if set(host) & set("/\\@?# \t"):
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_loopback(client: Sequence[object] | None) -> bool:
    if not client:
        return True  # a Unix socket, or a test without a network
    address = _address(str(client[0]))
    return address is not None and address.is_loopback


def _is_local(place: str | None) -> bool:
    """Return whether a server that listens on `place` can be reached from its own machine alone."""
    if place is None or place.lower() == "localhost":
        return place is not None
    address = _address(place)
    return address is not None and address.is_loopback


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address  # IPv4 at a socket of IPv6
