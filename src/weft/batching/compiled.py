"""Whether the installed package is compiled or pure Python."""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader

from . import dispatcher as dispatcher

is_compiled = isinstance(dispatcher.__loader__, ExtensionFileLoader)
