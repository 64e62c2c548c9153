"""How long a replica's batches take: a line through the last ones, seconds by rows, which every answer carries to the clients."""

from __future__ import annotations

#: The share of the older batches' weight that is left after one more batch, and after so many seconds in which none ran.
KEEP, FORGET_SECONDS = 15 / 16, 2.0
#: How much the guess counts that half of a batch's time does not depend on its rows: it decides where all batches were of one size.
GUESS = 0.5


class BatchTime:
    """The line, by least squares with weights that fade. The first batch, which may prepare what later ones use, counts alone."""

    def __init__(self) -> None:
        self.base = self.per_row = 0.0  # seconds of a batch, and of each row in it; both 0 before the first batch
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0  # faded sums
        self._batches = 0
        self._ended = 0.0

    def add(self, rows: int, seconds: float, now: float) -> None:
        """Take in a batch that ends now."""
        idle, self._ended = max(0.0, now - seconds - self._ended), now
        self._batches += 1
        keep = KEEP * 0.5 ** (idle / FORGET_SECONDS) if self._batches != 2 else 0.0
        self._count = self._count * keep + 1
        self._rows = self._rows * keep + rows
        self._seconds = self._seconds * keep + seconds
        self._squares = self._squares * keep + rows * rows
        self._products = self._products * keep + rows * seconds
        self._fit()

    def _fit(self) -> None:
        rows, seconds = self._rows / self._count, self._seconds / self._count
        if not rows:
            self.base, self.per_row = seconds, 0.0
            return
        count = self._count + GUESS  # the guess is a batch without rows that took half the time
        total = self._seconds + GUESS * seconds / 2
        slope = (self._products - self._rows * total / count) / (self._squares - self._rows * self._rows / count)
        self.per_row = min(max(slope, 0.0), seconds / rows)
        self.base = seconds - self.per_row * rows
