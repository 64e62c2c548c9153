"""How each autodiff framework records a call: one file per framework, imported when its arrays first appear.

An adapter has `is_recording(array)`, whether a call with this array must be recorded, and `apply(call, inputs)`, which returns
the flat outputs of the recorded call. It holds no arithmetic.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any


class Recording(threading.local):
    """The number of recorded calls that this thread is inside of."""

    depth = 0


def of(library: str, package: str = __name__) -> Any:
    """The adapter of a library, or the module named after the library in another package such as `weft.batching`."""
    return _MODULES.get((package, library)) or _load(package, library)


_MODULES: dict[tuple[str, str], Any] = {}


def _load(package: str, library: str) -> Any:
    module = _MODULES[package, library] = import_module(f"{package}.{library}")
    return module


# torch.compile must not trace this import. The adapter of torch then excludes the rest of weft. The attributes are private, and
# are set here because `torch_internals` imports torch; a version that does not know them ignores them.
_load._torchdynamo_disable = True  # type: ignore[attr-defined]
_load._torchdynamo_disable_msg = "weft runs outside compiled graphs"  # type: ignore[attr-defined]
