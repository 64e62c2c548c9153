"""How each autodiff framework records a call: one thin file per framework, imported when its arrays first appear.

An adapter has `is_recording(array)`, whether a call with this array must be recorded, and `apply(call, inputs)`, the flat
outputs of the recorded call. It holds no arithmetic.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def of(library: str) -> Any:
    """The adapter of a library by its name."""
    return _MODULES.get(library) or _load(library)


_MODULES: dict[str, Any] = {}


def _load(library: str) -> Any:
    _MODULES[library] = import_module(f"{__name__}.{library}")
    return _MODULES[library]


# torch.compile does not trace the import: the adapter then tells it to leave the rest alone, too.
_load._torchdynamo_disable = True  # type: ignore[attr-defined]
_load._torchdynamo_disable_msg = "weft runs outside compiled graphs"  # type: ignore[attr-defined]
