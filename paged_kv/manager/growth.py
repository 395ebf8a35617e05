"""Growth: where the next tokens of a sequence go, and whose blocks they must not touch.

A sequence writes behind its last token. Its last block is partial or full; if it is partial, others may read
it:

    several holders               all but the last to write move to a copy; the last one writes in place
    one, found by the cache       it moves to a copy too, or if there is no block for that, the cache forgets it
    one, not found                it writes in place

Blocks beyond the last one hold nothing yet and have no other holder. Each call counts what it needs before it
takes any block, and takes all destinations of copies before it lets go of a source.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import OutOfBlocksError
from .events import Copied, Recorder
from .pool import BlockPool, expect
from .prefix import PrefixCache
from .swap import Swapper
from .tables import SequenceTables

Copies = list[tuple[int, int]]
"""(source, destination) blocks."""

Places = list[tuple[int, int, int]]
"""(group, row, place in the row's table)."""


class Growth:
    def __init__(
        self,
        pool: BlockPool,
        tables: SequenceTables,
        prefix: PrefixCache | None,
        swapper: Swapper,
        recorder: Recorder,
        publish: Callable[[], None],
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.prefix = prefix
        self.swapper = swapper
        self.recorder = recorder
        self.publish = publish  # what is left to publish may be equal to what is cached, and free blocks

    def one_each(self, rows: np.ndarray) -> tuple[np.ndarray, Copies]:
        """Slots of one more token for each row, [groups, rows], and block copies: the decode step.

        Rows that have room share a few array operations; only those at the end of what is known to be theirs
        ask.
        """
        slots = self.tables.arrays.advance(rows)
        if slots is not None:
            return slots, []
        block_copies = self._find_room(rows)
        return self.tables.arrays.advance(rows), block_copies

    def _find_room(self, rows: np.ndarray) -> Copies:
        """Notes where the next token of each row that asks goes and how many fit there, after making room for it."""
        tables, size = self.tables, self.tables.block_size
        asking, all_full, last = tables.arrays.asking(rows, size)
        if all_full:  # the usual case
            self._add_one_each(asking, last)
            return []
        listed = asking.tolist()
        block_copies = self._make_room(listed, [1] * len(listed), 0)
        for row in listed:
            place, offset = divmod(int(tables.seq_len[row]), size)
            tables.room[row] = size - offset
            for group, blocks in enumerate(tables.blocks):
                tables.next_slot[group, row] = int(blocks[row, place]) * size + offset
        return block_copies

    def _add_one_each(self, rows: np.ndarray, last: list[list[int]]) -> None:
        """One more block for each of the rows, whose last ones in each group are full."""
        tables, pool = self.tables, self.pool
        needed = len(rows) * len(last)
        if needed > pool.num_available:
            self.publish()
        if needed > pool.num_available:
            raise OutOfBlocksError(needed, pool.num_available)
        width = int(tables.num_blocks[rows].max()) + 1
        tables.reserve_width(width)
        taken = [pool.take_each(blocks) for blocks in last]
        if self.recorder.subscribers:
            for group, blocks in enumerate(taken):
                for row, block in zip(rows.tolist(), blocks, strict=True):
                    place = int(tables.num_blocks[row])
                    self.recorder.held(tables.seq_ids[row], group, place, [block])
        tables.arrays.add_blocks(rows, taken, tables.block_size)

    def many(self, rows: np.ndarray, counts: list[int], lookahead: int) -> tuple[np.ndarray, Copies]:
        """Slots of `counts` more tokens for each row, [groups, sum(counts)], and block copies: prefill, drafts."""
        tables, size = self.tables, self.tables.block_size
        listed, old = rows.tolist(), tables.seq_len[rows].tolist()
        block_copies = self._make_room(listed, counts, lookahead)
        slots = np.empty((len(tables.blocks), sum(counts)), np.int64)
        end = 0
        for row, start, count in zip(listed, old, counts, strict=True):
            tables.room[row] = 0
            if not count:
                continue
            stop, end = start + count, end + count
            for group, group_slots in enumerate(slots):
                group_slots[end - count : end] = tables.slots(group, row, start, stop)
                tables.next_slot[group, row] = group_slots[end - 1] + 1
            tables.seq_len[row] = stop
            tables.room[row] = -stop % size  # what is left of a block just written to is the row's own
        return slots, block_copies

    def _make_room(self, rows: list[int], counts: list[int], lookahead: int) -> Copies:
        """Gets the rows blocks of their own for `counts` and `lookahead` more tokens, or raises and does
        nothing.

        Returns the (source, destination) copies to make.
        """
        tables, pool, size = self.tables, self.pool, self.tables.block_size
        growing, writing, needed = [], [], 0
        seq_lens, num_blocks = tables.seq_len[rows].tolist(), tables.num_blocks[rows].tolist()
        for row, seq_len, held, count in zip(rows, seq_lens, num_blocks, counts, strict=True):
            more = -(-(seq_len + count + lookahead) // size) - held
            if more > 0:
                growing.append((row, more))
                needed += more * len(self.tables.blocks)
            if count and seq_len % size:
                writing.append(row)
        copies, overwritten = self.plan_copies(writing) if writing else ([], [])
        if needed + len(copies) > pool.num_available:
            self.publish()  # which may change who holds what
            copies, overwritten = self.plan_copies(writing) if writing else ([], [])
        needed += len(copies)
        if needed > pool.num_available:
            raise OutOfBlocksError(needed, pool.num_available)
        if needed + len(overwritten) <= pool.num_available:  # rather copy than lose what the cache finds
            copies, overwritten = copies + overwritten, []

        for row, more in growing:
            self._grow(row, more)
        for group, row, place in overwritten:
            block = int(tables.blocks[group, row, place])
            self.prefix.forget([block])
            pool.uncache(block)
        block_copies = self._copy(copies)
        if writing and self.swapper.host_of:
            for row in writing:
                place, offset = divmod(int(tables.seq_len[row]), size)
                for block in tables.blocks[:, row, place].tolist():
                    self.swapper.note_write(block, offset)
        return block_copies

    def _grow(self, row: int, count: int) -> None:
        """`count` more blocks in every group."""
        tables = self.tables
        start = int(tables.num_blocks[row])
        tables.reserve_width(start + count)
        for group in range(len(self.tables.blocks)):
            last = int(tables.blocks[group, row, start - 1]) if start > tables.first_block[group, row] else -1
            taken = self.pool.take(count, last)
            tables.blocks[group, row, start : start + count] = taken
            if self.recorder.subscribers:
                self.recorder.held(tables.seq_ids[row], group, start, taken.tolist())
        tables.num_blocks[row] = start + count

    def plan_copies(self, rows: list[int]) -> tuple[Places, Places]:
        """What must happen before the rows write into their partial last blocks.

        First the blocks to copy because others hold them, then those that only the prefix cache still finds: these may
        be copied, or else overwritten and forgotten.
        """
        ref_count, is_cached = self.pool.ref_count, self.pool.is_cached
        places = (self.tables.seq_len[rows] // self.tables.block_size).tolist()
        shared, cached = [], []
        for group, blocks in enumerate(self.tables.blocks):
            left: dict[int, int] = {}
            for row, place, block in zip(rows, places, blocks[rows, places].tolist(), strict=True):
                holders = left.get(block, ref_count[block])
                if holders > 1:  # every holder but the last moves to a copy; the last one writes in place
                    left[block] = holders - 1
                    shared.append((group, row, place))
                elif is_cached[block]:
                    cached.append((group, row, place))
        return shared, cached

    def _copy(self, places: Places) -> Copies:
        """Gives each (group, row, place) a block of its own for the content it shares now."""
        tables = self.tables
        pairs = []
        for group, row, place in places:
            source = int(tables.blocks[group, row, place])
            after = (
                int(tables.blocks[group, row, place - 1]) if place > tables.first_block[group, row] else -1
            )
            destination = self.pool.take_each([after])[0]
            tables.blocks[group, row, place] = destination
            if self.prefix is not None:
                self.prefix.tokens[destination] = self.prefix.tokens[source]
            pairs.append((source, destination))
            if self.recorder.subscribers:
                self.recorder.emit(Copied(tables.seq_ids[row], group, place, source, destination))
        for source, _ in pairs:  # only now: no destination may be a source of the same step
            self.pool.drop(np.array([source]))
        self.recorder.counters.copied += len(pairs)
        return pairs

    def check(self) -> None:
        """Verifies what `room` promises, see tables.py."""
        for row in self.tables.row_of.values():
            if self.tables.room[row]:
                self._check_room(row)

    def _check_room(self, row: int) -> None:
        tables = self.tables
        place, offset = divmod(int(tables.seq_len[row]), tables.block_size)
        expect(offset + tables.room[row] == self.tables.block_size, "room is what is left of a block")
        for group, blocks in enumerate(tables.blocks):
            block = int(blocks[row, place])
            expect(
                tables.next_slot[group, row] == block * self.tables.block_size + offset,
                "next_slot is the next one",
            )
            expect(self.pool.ref_count[block] == 1, "a block with room has one holder")
            expect(not self.pool.is_cached[block], "a block with room is not cached")
