"""How each autodiff framework records a call: one thin file per framework, imported when its arrays first appear.

An adapter has `is_recording(array)`, whether a call with this array must be recorded, and `apply(call, inputs)`, the flat
outputs of the recorded call. It holds no arithmetic.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def of(library: str, room: str = __name__) -> Any:
    """The adapter of a library by its name; or the module of that name in another room, such as `weft.batching`."""
    return _MODULES.get((room, library)) or _load(room, library)


_MODULES: dict[tuple[str, str], Any] = {}


def _load(room: str, library: str) -> Any:
    module = _MODULES[room, library] = import_module(f"{room}.{library}")
    return module


# torch.compile does not trace the import: the adapter then tells it to leave the rest alone, too.
_load._torchdynamo_disable = True  # type: ignore[attr-defined]
_load._torchdynamo_disable_msg = "weft runs outside compiled graphs"  # type: ignore[attr-defined]
