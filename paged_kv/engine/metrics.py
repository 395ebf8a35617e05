"""How the cache was used over the steps of an engine, and what a contiguous cache would have reserved."""

from __future__ import annotations

from dataclasses import dataclass

from ..manager import Stats

__all__ = ["CacheUse"]


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
        return (
            f"paged cache at its peak: {self.tokens_at_peak} tokens held in {self.peak_blocks} blocks of "
            f"{self.block_size} slots, {self.peak_bytes / mib:.1f} MiB\n"
            f"waste: {self.waste_at_peak:.1%} of the allocated slots at the peak, "
            f"{self.mean_waste:.1%} on average\n"
            f"a contiguous cache would have reserved {self.peak_sequences} x {self.reserved_per_sequence} = "
            f"{self.contiguous_tokens} slots, {self.contiguous_bytes / mib:.1f} MiB, "
            f"{self.contiguous_waste:.1%} waste, {saved:.0f} times the memory"
        )
