"""The figures: what the blocks are used for at this moment, and what has happened so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .events import Counters
from .pins import Pins
from .pool import BlockPool
from .tables import SequenceTables


@dataclass(frozen=True)
class Stats:
    """What the pool's blocks are used for, in blocks and in token slots; exact at the moment of the call."""

    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_used_blocks: int
    num_shared_blocks: int  # used by more than one holder
    num_saved_blocks: int  # blocks that would be used beyond these if nothing were shared
    num_pinned_blocks: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_sequences: int  # on the device
    num_swapped_sequences: int
    num_used_slots: int  # slots of used blocks
    num_held_tokens: int  # of these, slots holding a token; a shared block counts once
    counters: Counters  # totals since the manager was made

    @property
    def waste(self) -> float:
        """Allocated slots holding no token, as a share of the allocated slots (0 where none are)."""
        return 1.0 - self.num_held_tokens / self.num_used_slots if self.num_used_slots else 0.0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the prefix cache, as a share of those looked for (0 where none were)."""
        return (
            self.counters.cached_tokens / self.counters.prompt_tokens if self.counters.prompt_tokens else 0.0
        )


def collect(
    pool: BlockPool, tables: SequenceTables, pins: Pins, host: BlockPool, counters: Counters
) -> Stats:
    used_slots = pool.num_in_use * tables.block_size
    return Stats(
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_evictable_blocks=pool.num_evictable,
        num_used_blocks=pool.num_in_use,
        num_shared_blocks=pool.num_shared,
        num_saved_blocks=pool.num_holdings - pool.num_in_use,
        num_pinned_blocks=pins.num_pinned,
        num_host_blocks=host.num_blocks,
        num_used_host_blocks=host.num_in_use,
        num_sequences=len(tables.row_of),
        num_swapped_sequences=len(tables.away),
        num_used_slots=used_slots,
        num_held_tokens=used_slots - _count_empty_slots(tables, pool),
        counters=replace(counters),
    )


def _count_empty_slots(tables: SequenceTables, pool: BlockPool) -> int:
    """Slots of used blocks that hold no token: those after a sequence's last token. Costs O(sequences)."""
    block_size = tables.block_size
    rows = np.fromiter(tables.row_of.values(), np.int64, len(tables.row_of))
    seq_len = tables.seq_len[rows]
    lookahead = tables.num_blocks[rows] - -(-seq_len // block_size)
    empty = int(lookahead.sum()) * block_size * len(tables.blocks)
    partial = seq_len % block_size > 0
    fill = seq_len[partial] % block_size
    for blocks in tables.blocks:
        tails, index = np.unique(blocks[rows[partial], seq_len[partial] // block_size], return_inverse=True)
        fullest = np.zeros(len(tails), np.int64)
        np.maximum.at(fullest, index, fill)
        # A holder for whom the block is not the last one has filled it, and so has who published it.
        full = pool.cached[tails] | (np.bincount(index, minlength=len(tails)) < pool.refs[tails])
        empty += int((block_size - fullest)[~full].sum())
    return empty
