"""The block tables: one row a sequence, in arrays that grow in place; a batch of rows is one numpy gather.

Layers may be split into groups (full attention, windows of several lengths). Every group has its own table of the same
width: entry `position // block_size` of group g names the block that holds that position for g's layers.

    first_block[g] <= place < num_blocks           for every block that a row holds in group g
    num_named * block_size <= computed_len <= seq_len <= num_blocks * block_size
    room > 0  =>  the next `room` tokens go to next_slot and the slots after it, in a block that nobody else reads

`room` is what makes decode cheap: where it is not 0, nothing has to be asked before a token gets its slot. It may be 0
at any time, and is whenever a call could have changed whose block that is; the next append finds out again.

Entries outside [first_block, num_blocks) hold 0 or an old id: they are never read as a holding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .._manager import RowArrays
from ..errors import DuplicateSequenceError, SwappedSequenceError, UnknownSequenceError, UsageError
from .arguments import hashable, is_listing, listing
from .chain import TokenChain
from .pool import expect

UNLIMITED = np.iinfo(np.int64).max
"""known_len of a sequence whose tokens are all known."""


@dataclass
class SavedRow:
    """A sequence without a row: its block ids mean what its keeper says."""

    seq_len: int
    computed_len: int
    known_len: int
    num_named: int
    first_block: np.ndarray  # [groups]
    blocks: list[list[int]]  # [groups] of the blocks held in the group, in order
    chain: TokenChain

    def forget_names(self) -> None:
        """Nothing of it is published any more, but what it holds stays its own."""
        self.num_named = 0
        self.known_len = 0 if self.seq_len else UNLIMITED
        self.chain.digests.clear()

    def flat_blocks(self) -> np.ndarray:
        """The blocks of all groups, [n] int64."""
        return np.array([block for blocks in self.blocks for block in blocks], np.int64)


class SequenceTables:
    """Rows of sequences. `rows(seq_ids)` gives indices that all arrays here share."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.block_size = block_size
        self._offsets = np.arange(block_size)
        self.row_of: dict[Hashable, int] = {}
        self.seq_ids: list[Hashable] = []  # by row
        self._num_opened = 0
        self._last_seq_ids: list[Hashable] | None = None  # a step asks for one batch's rows several times
        self._last_rows = np.zeros(0, np.int64)
        self.away: dict[Hashable, SavedRow] = {}
        self.chains: dict[int, TokenChain] = {}  # by row
        self._free_rows: list[int] = []
        self.blocks = np.zeros((num_groups, 0, 8), np.int32)  # [groups, rows, width]
        self.first_block = np.zeros((num_groups, 0), np.int64)  # [groups, rows]
        # [rows] each
        self.num_blocks = np.zeros(
            0, np.int64
        )  # blocks that the table reaches, those behind a window included
        self.seq_len = np.zeros(0, np.int64)  # tokens with a slot
        self.computed_len = np.zeros(0, np.int64)  # tokens whose keys and values are there
        self.known_len = np.zeros(
            0, np.int64
        )  # tokens before the first without an id, UNLIMITED if all have one
        self.num_named = np.zeros(0, np.int64)  # full blocks that the prefix cache was told of
        self.opened = np.zeros(0, np.int64)  # rises with every sequence: tells which came first
        self.room = np.zeros(0, np.int64)
        self.next_slot = np.zeros((num_groups, 0), np.int64)  # [groups, rows]
        self._bind()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def __contains__(self, seq_id: Hashable) -> bool:
        try:
            return seq_id in self.row_of or seq_id in self.away
        except TypeError:
            hashable("seq_id", seq_id)
            raise

    def open(self, seq_id: Hashable, chain: TokenChain) -> int:
        """A row of length 0 for `seq_id`, which has none."""
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        self.row_of[seq_id] = row
        self.seq_ids[row] = seq_id
        self.chains[row] = chain
        self.opened[row] = self._num_opened
        self._num_opened += 1
        self.first_block[:, row] = 0
        for field in (self.num_blocks, self.seq_len, self.computed_len, self.num_named, self.room):
            field[row] = 0
        self.known_len[row] = UNLIMITED
        return row

    def close(self, seq_id: Hashable) -> None:
        row = self.row_of.pop(seq_id)
        self.seq_ids[row] = None
        self.computed_len[row] = 0  # nothing to publish
        del self.chains[row]
        self._free_rows.append(row)
        self._last_seq_ids = None

    def save(self, row: int) -> SavedRow:
        """What the row holds, without lookahead blocks."""
        first, stop = self.first_block[:, row].copy(), self.blocks_for(int(self.seq_len[row]))
        return SavedRow(
            int(self.seq_len[row]),
            int(self.computed_len[row]),
            int(self.known_len[row]),
            int(self.num_named[row]),
            first,
            [self.blocks[group, row, start:stop].tolist() for group, start in enumerate(first)],
            self.chains[row].copy(),
        )

    def assign(self, row: int, saved: SavedRow) -> None:
        """Gives the row what was saved."""
        self.chains[row] = saved.chain
        self.seq_len[row] = saved.seq_len
        self.computed_len[row] = saved.computed_len
        self.known_len[row] = saved.known_len
        self.num_named[row] = saved.num_named
        self.first_block[:, row] = saved.first_block
        self.num_blocks[row] = self.blocks_for(saved.seq_len)
        self.room[row] = 0
        self.reserve_width(int(self.num_blocks[row]))
        for group in range(len(self.blocks)):
            self.held(group, row)[:] = saved.blocks[group]

    def restore(self, seq_id: Hashable, saved: SavedRow) -> int:
        """A row for `seq_id`, which has none, with what was saved."""
        row = self.open(seq_id, saved.chain)
        self.assign(row, saved)
        return row

    def row(self, seq_id: Hashable) -> int:
        try:
            return self.row_of[seq_id]
        except KeyError:
            raise self._no_row(seq_id) from None
        except TypeError:
            hashable("seq_id", seq_id)
            raise

    def rows(self, seq_ids: Sequence[Hashable]) -> np.ndarray:
        """Row of each of the distinct sequences, [len(seq_ids)] int64."""
        row_of = self.row_of
        try:
            if isinstance(seq_ids, list) and seq_ids == self._last_seq_ids:
                return self._last_rows
            listing("seq_ids", seq_ids, "a sequence of ids")
            rows = [row_of[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise self._no_row(error.args[0]) from None
        except (TypeError, ValueError):  # an array is not hashable, nor is its equality one truth
            for seq_id in seq_ids if is_listing(seq_ids) else ():
                hashable("seq_id", seq_id)
            raise
        if len(set(rows)) != len(rows):
            twice = next(seq_id for i, seq_id in enumerate(seq_ids) if seq_id in seq_ids[:i])
            raise DuplicateSequenceError(twice, "is named twice in one call")
        self._last_seq_ids = list(seq_ids)
        self._last_rows = np.array(rows, np.int64)
        self._last_rows.flags.writeable = False
        return self._last_rows

    def _no_row(self, seq_id: Hashable) -> UsageError:
        return SwappedSequenceError(seq_id) if seq_id in self.away else UnknownSequenceError(seq_id)

    def held(self, group: int, row: int) -> np.ndarray:
        """The blocks that the row holds in the group, in order: a view, [n] int32."""
        return self.blocks[group, row, self.first_block[group, row] : self.num_blocks[row]]

    def held_backwards(self, row: int, start: int = 0) -> np.ndarray:
        """The blocks that the row holds at `start` and later, of all groups, last place first: [n] int32.

        The order in which they are let go, so that the end of a chain is evicted before its beginning.
        """
        stop = int(self.num_blocks[row])
        places = np.arange(stop - 1, start - 1, -1)[:, None]
        return self.blocks[:, row, start:stop].T[::-1][places >= self.first_block[:, row]]

    def slots(self, group: int, row: int, start: int, stop: int) -> np.ndarray:
        """Slots of the row's positions `start` to `stop` in the group, [stop - start] int64."""
        return self.arrays.slots(group, row, start, stop, self.block_size)

    def slots_of(self, blocks: np.ndarray) -> np.ndarray:
        """All slots of the blocks, [len(blocks) * block_size] int64; in place, as large temporaries cost more."""
        slots = np.repeat(blocks.astype(np.int64) * self.block_size, self.block_size)
        slots.reshape(-1, self.block_size)[:] += self._offsets
        return slots

    def reserve_width(self, width: int) -> None:
        """Makes room for tables of `width` blocks, at least doubling, so that growth costs O(1) an entry."""
        groups, rows, old = self.blocks.shape
        if width > old:
            wider = np.zeros((groups, rows, max(width, 2 * old)), np.int32)
            wider[:, :, :old] = self.blocks
            self.blocks = wider
            self._bind()

    def _bind(self) -> None:
        """The loops of csrc/manager are to work on the arrays as they are now."""
        self.arrays = RowArrays(self.room, self.seq_len, self.num_blocks, self.next_slot, self.blocks)

    def _add_rows(self) -> None:
        old = self.blocks.shape[1]
        new = max(8, 2 * old)

        def grown(array: np.ndarray, axis: int = 0) -> np.ndarray:
            shape = list(array.shape)
            shape[axis] = new - old
            return np.concatenate([array, np.zeros(shape, array.dtype)], axis)

        self.blocks = grown(self.blocks, 1)
        self.first_block = grown(self.first_block, 1)
        self.next_slot = grown(self.next_slot, 1)
        self.num_blocks = grown(self.num_blocks)
        self.seq_len = grown(self.seq_len)
        self.computed_len = grown(self.computed_len)
        self.known_len = grown(self.known_len)
        self.num_named = grown(self.num_named)
        self.opened = grown(self.opened)
        self.seq_ids.extend([None] * (new - old))
        self.room = grown(self.room)
        self._bind()
        self._free_rows.extend(range(new - 1, old - 1, -1))

    # Proof

    def check(self, num_pool_blocks: int) -> np.ndarray:
        """Verifies the invariants above; returns how many entries name each block, [num_pool_blocks]."""
        holders = np.zeros(num_pool_blocks, np.int64)
        rows = list(self.row_of.values())
        expect(
            sorted(rows + self._free_rows) == list(range(self.blocks.shape[1])),
            "each row has one user or is free",
        )
        expect(set(rows) == set(self.chains), "each row in use has a chain")
        expect({self.seq_ids[row]: row for row in rows} == self.row_of, "a row knows its sequence")
        expect(not self.computed_len[self._free_rows].any(), "a free row has nothing to publish")
        expect(
            sorted(rows, key=self.opened.__getitem__) == rows, "sequences are in the order of their coming"
        )
        expect(not self.row_of.keys() & self.away.keys(), "a sequence is on the device or on the host")
        for row in rows:
            num_blocks, seq_len, num_named = self.num_blocks[row], self.seq_len[row], self.num_named[row]
            computed_len, known_len = self.computed_len[row], self.known_len[row]
            expect(0 <= num_named * self.block_size <= min(computed_len, known_len), "named blocks are known")
            expect(computed_len <= seq_len <= num_blocks * self.block_size, "every token has a slot")
            expect(len(self.chains[row].digests) >= num_named, "named blocks have a digest")
            for group in range(len(self.blocks)):
                expect(0 <= self.first_block[group, row] <= num_blocks, "first_block is a place of the table")
                held = self.held(group, row)
                expect(len(np.unique(held)) == len(held), "a sequence holds a block once")
                holders[held] += 1
        return holders
