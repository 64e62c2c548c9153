"""Who may do what: the bearer token, and the checks of endpoints that change something."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from ..errors import InvalidArgumentError
from .errors import HttpError
from .http import Exchange

_NAMES = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Checks requests against a token, and the origin of those that change something."""

    def __init__(self, token: str | None = None, hosts: Sequence[str] = ()) -> None:
        if token is not None and not token.strip():
            raise InvalidArgumentError("the token must not be empty")
        self._token = None if token is None else token.strip().encode()
        self._hosts = {host.lower() for host in hosts}

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def check(self, exchange: Exchange) -> None:
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
    try:
        address = ip_address(str(client[0]))
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback  # IPv4 at a socket of IPv6
    except ValueError:
        return False
