"""Scale-out on Ray: the batches of one model, forward and backward, shared by many processes and machines."""

from typing import Any

__all__ = ["RemoteBatcher", "deploy", "serve"]

_PLACES = {"RemoteBatcher": "handle", "deploy": "deployment", "serve": "serving"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:  # they import msgspec and Ray
        from importlib import import_module

        return getattr(import_module(f"weft.ray.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'weft.ray' has no attribute {name!r}")
