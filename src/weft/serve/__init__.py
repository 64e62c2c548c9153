"""Models behind HTTP: the Open Inference Protocol and TensorFlow Serving's REST API over batchers, and a page that shows them."""

from . import errors
from .app import App, app
from .limits import Limits
from .model import Model, model

__all__ = ["App", "Limits", "Model", "app", "errors", "model"]
