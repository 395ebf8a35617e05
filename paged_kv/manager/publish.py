"""Publishing: the prefix cache is told of full blocks, and blocks that nobody can see any more are let go.

    num_named = min(computed_len, known_len) // block_size     for every sequence, once `publish` has run

A named block is the one that the cache finds under its digest: where the content is there already, the row lets go of
its own block and holds that one instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .events import Dropped, Recorder
from .pool import BlockPool
from .prefix import PrefixCache
from .tables import SequenceTables


class Publisher:
    def __init__(
        self, pool: BlockPool, tables: SequenceTables, prefix: PrefixCache | None, recorder: Recorder
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.prefix = prefix
        self.recorder = recorder
        self.pending = False  # whether a commit may have left blocks to publish

    def publish(self) -> None:
        """Tells the prefix cache of all blocks that are full of computed, known tokens, the oldest sequence first.

        It is put off from `commit` to the calls that depend on it: a decode step pays nothing for it, and a sequence's
        blocks come in one go.
        """
        if not self.pending:
            return
        self.pending = False
        tables = self.tables
        full = np.minimum(tables.computed_len, tables.known_len) // tables.block_size
        rows = (full > tables.num_named).nonzero()[0]
        for row in rows[tables.opened[rows].argsort()].tolist():
            self._publish_row(row, int(full[row]))

    def _publish_row(self, row: int, stop: int) -> None:
        tables, prefix, chain = self.tables, self.prefix, self.tables.chains[row]
        start = int(tables.num_named[row])
        blocks = tables.blocks[:, row, start:stop]
        tokens = prefix.tokens.take(blocks[0], axis=0)
        chain.name(tokens.tobytes(), start, stop - start)
        for group, group_blocks in enumerate(blocks):
            twins = prefix.store(chain, group, group_blocks, start)
            if twins:
                self._merge(row, group, twins)
        tables.num_named[row] = stop

    def _merge(self, row: int, group: int, twins: list[tuple[int, int]]) -> None:
        """Lets the row's table name the blocks that hold the same content already: (place, block)."""
        places = [place for place, _ in twins]
        known = [block for _, block in twins]
        self.pool.hold(np.array(known))
        self.pool.drop(self.tables.blocks[group, row, places])
        for place, block in twins:
            self.tables.blocks[group, row, place] = block
            self.recorder.held(self.tables.seq_ids[row], group, place, [block])

    def slide(self, seq_ids: Sequence[Hashable], rows: np.ndarray, group: int, window: int) -> None:
        """Lets go of the blocks that no token after the computed ones sees through the window."""
        tables = self.tables
        needed = np.maximum(0, tables.computed_len[rows] - window + 1) // self.tables.block_size
        for i in np.flatnonzero(needed > tables.first_block[group, rows]).tolist():
            row, old, new = int(rows[i]), int(tables.first_block[group, rows[i]]), int(needed[i])
            self.pool.drop(tables.blocks[group, row, old:new])
            tables.first_block[group, row] = new
            if self.recorder.subscribers:
                self.recorder.emit(Dropped(seq_ids[i], group, old, new))
