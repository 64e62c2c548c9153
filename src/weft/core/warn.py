"""Warnings at the line that called into weft. This file is never compiled: it counts its own frame."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called into this package."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
