"""Models behind HTTP: the Open Inference Protocol and TensorFlow Serving's REST API over batchers, and a page that shows them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from .application import App, app
    from .limits import Limits
    from .models import Model, model

__all__ = ["App", "Limits", "Model", "app", "errors", "model"]

#: Where the names are: `errors` needs none of the packages that a server needs.
_PLACES = {"App": "application", "app": "application", "Limits": "limits", "Model": "models", "model": "models"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
