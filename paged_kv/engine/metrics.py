"""What an engine has done and how long it took; and what a contiguous cache would have reserved."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field, fields
from itertools import accumulate

from ..manager import Stats

__all__ = ["CacheUse", "EngineMetrics", "Histogram"]

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: from a step of a tiny model to a prompt that waits for a minute."""

GAUGES = ("num_running", "num_waiting", "cache_use", "hit_rate", "acceptance_rate")
"""What tells how things stand; the others only grow."""


class Histogram:
    """Durations in seconds: totals of all, quantiles of the last 10,000."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)
        self._recent: deque[float] = deque(maxlen=10_000)

    def observe(self, seconds: float) -> None:
        self.count += 1
        self.sum += seconds
        self.buckets[bisect_left(BUCKETS, seconds)] += 1
        self._recent.append(seconds)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """The least duration that a share of at least `q` does not exceed; 0 where there is none."""
        ordered = sorted(self._recent)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0

    def prometheus(self, name: str) -> list[str]:
        bounds = zip((*BUCKETS, "+Inf"), accumulate(self.buckets), strict=True)
        lines = [f'{name}_bucket{{le="{bound}"}} {number}' for bound, number in bounds]
        return [*lines, f"{name}_sum {self.sum}", f"{name}_count {self.count}"]


@dataclass
class EngineMetrics:
    """Totals since the engine was made, and how things stand after the last step."""

    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    queue_time: Histogram = field(default_factory=Histogram)  # from arrival to the first computed token
    num_steps: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0  # of these, in the model's forward
    computed_tokens: int = 0  # those computed again after a preemption included
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    new_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # guesses that were right
    recomputed: int = 0  # preemptions that gave the blocks back
    swapped: int = 0  # preemptions that moved the blocks to the host
    finished: Counter[str] = field(default_factory=Counter)  # sequences by reason
    num_running: int = 0  # sequences that run
    num_waiting: int = 0  # requests that wait
    cache_use: float = 0.0  # blocks in use / all blocks

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the prefix cache, as a share of all."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Guesses that were right, as a share of all."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def own_share(self) -> float:
        """What of the steps' time was not the model's forward."""
        return 1 - self.model_seconds / self.step_seconds if self.step_seconds else 0.0

    def prometheus(self) -> str:
        """All of it in Prometheus' text format."""
        lines: list[str] = []
        for name in (*(each.name for each in fields(self)), "hit_rate", "acceptance_rate"):
            value, kind = getattr(self, name), "gauge" if name in GAUGES else "counter"
            name = f"paged_kv_engine_{name}"
            if isinstance(value, Histogram):
                lines += [f"# TYPE {name}_seconds histogram", *value.prometheus(f"{name}_seconds")]
            elif isinstance(value, Counter):
                lines.append(f"# TYPE {name}_total counter")
                lines += [f'{name}_total{{reason="{key}"}} {n}' for key, n in sorted(value.items())]
            else:
                name += "_total" * (kind == "counter")
                lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        """The lines of `python -m paged_kv generate --stats`."""

        def quantiles(histogram: Histogram) -> str:
            return (
                f"{histogram.quantile(0.5) * 1e3:.1f} ms median, {histogram.quantile(0.99) * 1e3:.1f} ms p99"
            )

        finished = ", ".join(f"{number} {reason}" for reason, number in sorted(self.finished.items()))
        return (
            f"time to first token: {quantiles(self.time_to_first_token)}; of that in line: "
            f"{quantiles(self.queue_time)}\n"
            f"between tokens: {quantiles(self.inter_token_latency)}\n"
            f"steps: {self.num_steps}, {self.computed_tokens} tokens computed; "
            f"outside the model's forward: {self.own_share:.1%} of the time\n"
            f"prefix cache: {self.cached_tokens} of {self.prompt_tokens} prompt tokens found, {self.hit_rate:.1%}\n"
            f"drafts: {self.accepted_tokens} of {self.drafted_tokens} accepted, {self.acceptance_rate:.1%}\n"
            f"preemptions: {self.recomputed} by recompute, {self.swapped} by swap\n"
            f"sequences: {self.num_running} running, {self.num_waiting} requests waiting, finished: "
            f"{finished or 'none'}; blocks in use: {self.cache_use:.1%}"
        )


@dataclass
class CacheUse:
    """Figures over all steps so far; tokens and slots are counted for one layer.

    A contiguous cache reserves `reserved_per_sequence` slots, a sequence's greatest length, for every
    sequence that runs: that is what requests hold where memory is not handed out in blocks.
    """

    block_size: int
    bytes_per_token: int  # keys and values of all layers
    reserved_per_sequence: int
    num_steps: int = 0
    peak_blocks: int = 0
    tokens_at_peak: int = 0
    waste_at_peak: float = 0.0
    saved_at_peak: int = 0  # blocks that the sequences would have held beyond these if they shared none
    peak_sequences: int = 0
    _waste_sum: float = 0.0

    def record(self, stats: Stats) -> None:
        """Notes what is held during a step."""
        self.num_steps += 1
        self._waste_sum += stats.waste
        self.peak_sequences = max(self.peak_sequences, stats.num_sequences)
        if (stats.num_used_blocks, stats.num_held_tokens) > (self.peak_blocks, self.tokens_at_peak):
            self.peak_blocks, self.tokens_at_peak = stats.num_used_blocks, stats.num_held_tokens
            self.waste_at_peak = stats.waste
            self.saved_at_peak = stats.num_saved_blocks

    @property
    def mean_waste(self) -> float:
        """Allocated slots holding no token, as a share of the allocated slots, averaged over the steps."""
        return self._waste_sum / self.num_steps if self.num_steps else 0.0

    @property
    def peak_bytes(self) -> int:
        return self.peak_blocks * self.block_size * self.bytes_per_token

    @property
    def contiguous_tokens(self) -> int:
        """Slots that a contiguous cache would have reserved for as many sequences as ran at once."""
        return self.peak_sequences * self.reserved_per_sequence

    @property
    def contiguous_bytes(self) -> int:
        return self.contiguous_tokens * self.bytes_per_token

    @property
    def contiguous_waste(self) -> float:
        """What of that would have held no token."""
        return 1 - self.tokens_at_peak / self.contiguous_tokens if self.contiguous_tokens else 0.0

    def __str__(self) -> str:
        """The lines that close `python -m paged_kv generate`."""
        if not self.num_steps:
            return "kv cache: nothing was computed"
        mib = 2**20
        saved = self.contiguous_bytes / self.peak_bytes
        shared = ""
        if self.saved_at_peak:
            shared = f"sharing saved {self.saved_at_peak} blocks more that sequences apart would have held\n"
        return (
            f"paged cache at its peak: {self.tokens_at_peak} tokens held in {self.peak_blocks} blocks of "
            f"{self.block_size} slots, {self.peak_bytes / mib:.1f} MiB\n{shared}"
            f"waste: {self.waste_at_peak:.1%} of the allocated slots at the peak, "
            f"{self.mean_waste:.1%} on average\n"
            f"a contiguous cache would have reserved {self.peak_sequences} x {self.reserved_per_sequence} = "
            f"{self.contiguous_tokens} slots, {self.contiguous_bytes / mib:.1f} MiB, "
            f"{self.contiguous_waste:.1%} waste, {saved:.0f} times the memory"
        )
