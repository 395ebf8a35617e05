"""Pins: prefixes that are kept from eviction, within a budget of blocks and until they expire.

a pin is one holder of each of its blocks;  num_pinned = number of distinct pinned blocks <= budget
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import PinBudgetError
from .pool import expect


@dataclass(frozen=True)
class Pin:
    """A pinned prefix of `num_tokens` tokens; hand it to `unpin`, or let it expire."""

    number: int
    num_tokens: int
    expires_at: float  # in the manager's clock; inf: never


class Pins:
    def __init__(self, budget: int, clock: Callable[[], float]) -> None:
        self.budget = budget
        self.clock = clock
        self.blocks: dict[Pin, np.ndarray] = {}
        self._pins_of: Counter[int] = Counter()  # block -> pins that hold it
        self._next_number = 0

    @property
    def num_pinned(self) -> int:
        return len(self._pins_of)

    def add(self, blocks: np.ndarray, num_tokens: int, seconds: float | None) -> Pin:
        """Raises PinBudgetError if the budget doesn't allow for those of `blocks` that aren't pinned yet."""
        ids = blocks.tolist()
        needed = sum(block not in self._pins_of for block in ids)
        if needed > self.budget - self.num_pinned:
            raise PinBudgetError(needed, self.budget - self.num_pinned)
        expires_at = math.inf if seconds is None else self.clock() + seconds
        pin = Pin(self._next_number, num_tokens, expires_at)
        self._next_number += 1
        self._pins_of.update(ids)
        self.blocks[pin] = blocks
        return pin

    def remove(self, pin: Pin) -> np.ndarray:
        """The blocks that the pin held."""
        blocks = self.blocks.pop(pin)
        self._pins_of.subtract(blocks.tolist())
        for block in blocks.tolist():
            if not self._pins_of[block]:
                del self._pins_of[block]
        return blocks

    def expired(self) -> list[Pin]:
        now = self.clock()
        return [pin for pin in self.blocks if pin.expires_at <= now]

    def check(self) -> None:
        expect(
            self._pins_of == Counter(b for blocks in self.blocks.values() for b in blocks.tolist()),
            "pins are counted",
        )
        expect(self.num_pinned <= self.budget, "pins keep to their budget")
