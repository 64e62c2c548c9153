"""In which form the hot path of batching is installed: compiled ahead of time, or as the Python it is written in."""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader

from . import dispatcher as desk

is_compiled = isinstance(desk.__loader__, ExtensionFileLoader)
