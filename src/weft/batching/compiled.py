"""In which form the hot path of batching is installed: compiled ahead of time, or as the Python it is written in."""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader

from . import dispatcher as dispatcher

is_compiled = isinstance(dispatcher.__loader__, ExtensionFileLoader)
