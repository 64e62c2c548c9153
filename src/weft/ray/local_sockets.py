"""Unix sockets: each lies in a folder of its own that only this user can enter, and both ends look at the other's user.

Names in Linux's abstract space would need no folder, but every user of the machine, and every container that shares its network,
sees them and can take one when its owner has died.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

#: The longest path of a Unix socket, in bytes: what `sockaddr_un` holds, less the zero at its end.
MOST_PATH = 107 if sys.platform == "linux" else 103
#: The folder of a socket that is younger than this is not looked at: it may be about to listen.
YOUNG_SECONDS = 60.0

_FILE = "s"


def new_path() -> str | None:
    """Return a path for a new socket, in a new folder of this user alone; None where there can be none."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        with suppress(OSError):
            _remove_stale(place)
            folder = tempfile.mkdtemp(prefix=_prefix(), dir=place)  # its mode is 0700
            path = os.path.join(folder, _FILE)
            if len(os.fsencode(path)) <= MOST_PATH:
                return path
            os.rmdir(folder)
    return None


def remove(path: str) -> None:
    """Remove a socket and its folder."""
    with suppress(OSError):
        os.unlink(path)
    with suppress(OSError):
        os.rmdir(os.path.dirname(path))


def is_own(sock: socket.socket) -> bool:
    """Return False if the process at the other end of a Unix socket belongs to another user, as far as the system tells.

    The superuser counts as this user: it could read this process's memory.
    """
    user = peer_user(sock)
    return user is None or user in (os.geteuid(), 0)


def peer_user(sock: socket.socket) -> int | None:
    """Return the id of the user at the other end of a Unix socket, None where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    _, user, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return int(user)


def _prefix() -> str:
    return f"weft-{os.geteuid()}-"


def _remove_stale(place: str) -> None:
    """Remove the sockets that processes of this user left behind when they were killed."""
    for folder in Path(place).glob(f"{_prefix()}*"):
        with suppress(OSError):
            found = os.lstat(folder)
            is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_mine and time.time() - found.st_mtime > YOUNG_SECONDS and not _is_used(folder / _FILE):
                remove(str(folder / _FILE))


def _is_used(path: Path) -> bool:
    """Return True for what is no socket, and for a socket at which a process listens."""
    return path.exists() and (not path.is_socket() or _listens(str(path)))


def _listens(path: str) -> bool:
    """Return True if a process listens at a path, or may do so."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:  # such as a queue of connections that is full
            return True
    return True
