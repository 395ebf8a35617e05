"""A picture of the steps over time, in Chrome's trace format: open it in https://ui.perfetto.dev."""

from __future__ import annotations

import json
import time
from typing import TextIO

__all__ = ["StepTrace"]


class StepTrace:
    """Collects what each step did and when.

    Rows: the step as a whole, and within it scheduling, the model's forward, and sampling. Counters: sequences running,
    requests waiting, blocks in use and evictable.
    """

    def __init__(self) -> None:
        self._events: list[dict] = []
        self._origin = time.perf_counter()

    def span(self, name: str, start: float, end: float, **args: object) -> None:
        """Something that took from `start` to `end`, seconds of `time.perf_counter`."""
        self._add(name, "X", start, dur=round((end - start) * 1e6, 1), args=args)

    def count(self, name: str, at: float, **values: float) -> None:
        self._add(name, "C", at, args=values)

    def mark(self, name: str, at: float, **args: object) -> None:
        """Something that took no time, such as a preemption."""
        self._add(name, "i", at, s="t", args=args)

    def _add(self, name: str, phase: str, at: float, **rest: object) -> None:
        micros = round((at - self._origin) * 1e6, 1)
        self._events.append({"name": name, "ph": phase, "ts": micros, "pid": 1, "tid": 1, **rest})

    def write(self, file: TextIO) -> None:
        json.dump({"traceEvents": self._events, "displayTimeUnit": "ms"}, file)
