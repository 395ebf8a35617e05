"""What the memory was used for after every step."""

from __future__ import annotations

from array import array

import numpy as np

from .memory import Usage


class Timeline:
    """Usages, one a step."""

    def __init__(self) -> None:
        self._values = array("q")  # of one usage after the other: a long replay has a million

    def record(self, usage: Usage) -> None:
        self._values.extend(usage)

    def __len__(self) -> int:
        return len(self._values) // len(Usage._fields)

    def column(self, field: str) -> np.ndarray:
        """One field of every usage, [steps] int64."""
        return np.array(self._values).reshape(-1, len(Usage._fields))[:, Usage._fields.index(field)]

    def waste(self) -> np.ndarray:
        """Waste of each step in which anything was allocated, [n] float64."""
        return self._share("waste", "tokens", "waste")

    def saved(self) -> np.ndarray:
        """What sharing saved of the slots needed without it, in each step in which any were, [n] float64."""
        return self._share("saved", "tokens", "waste", "saved")

    def _share(self, part: str, *whole: str) -> np.ndarray:
        total = sum(self.column(field) for field in whole)
        return self.column(part)[total > 0] / total[total > 0]
