"""What the memory was used for after every step."""

from __future__ import annotations

import numpy as np

from .memory import Usage


class Timeline:
    """Usages, one a step."""

    def __init__(self) -> None:
        self._rows: list[Usage] = []

    def record(self, usage: Usage) -> None:
        self._rows.append(usage)

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, field: str) -> np.ndarray:
        """One field of every usage, [steps] int64."""
        place = Usage._fields.index(field)
        return np.fromiter((row[place] for row in self._rows), np.int64, len(self._rows))

    def waste(self) -> np.ndarray:
        """Waste of each step in which anything was allocated, [n] float64."""
        return self._share("waste", "tokens", "waste")

    def saved(self) -> np.ndarray:
        """What sharing saved of the slots needed without it, in each step in which any were, [n] float64."""
        return self._share("saved", "tokens", "waste", "saved")

    def _share(self, part: str, *whole: str) -> np.ndarray:
        total = sum(self.column(field) for field in whole)
        return self.column(part)[total > 0] / total[total > 0]
