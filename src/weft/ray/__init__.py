"""Scale-out on Ray: the batches of one model, forward and backward, shared by many processes and machines."""

from typing import Any

__all__ = ["RemoteBatcher", "deploy"]


def __getattr__(name: str) -> Any:
    if name == "deploy":  # imports Ray
        from .deploy import deploy

        globals()["deploy"] = deploy  # in place of the module of this name
        return deploy
    if name == "RemoteBatcher":
        from .handle import RemoteBatcher

        return RemoteBatcher
    raise AttributeError(f"module 'weft.ray' has no attribute {name!r}")
