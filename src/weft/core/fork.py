"""Fork handlers, where the platform can fork."""

from __future__ import annotations

import os
from collections.abc import Callable


def on_fork_in_child(function: Callable[[], object]) -> None:
    """Call `function` in each forked child process; does nothing on platforms without `os.fork`, such as Windows."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
