"""The block tables: one row a sequence, in arrays that grow in place, so that a batch of rows is one numpy
gather.

Layers may be split into groups (full attention, windows of several lengths). Every group has its own table
of the same width: entry `position // block_size` of group g names the block that holds that position for
g's layers.

    0 <= first_block[g] <= position // block_size < num_blocks     for every position that group g still
    holds seq_len <= num_blocks * block_size                              slots beyond seq_len are ready for
    later tokens

Entries outside [first_block, num_blocks) hold 0 or an old id: they are never read as a holding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from ..errors import DuplicateSequenceError, UnknownSequenceError


class SequenceTables:
    """Rows of sequences. `rows(seq_ids)` gives indices that all arrays here share."""

    def __init__(self, num_groups: int) -> None:
        self.row_of: dict[Hashable, int] = {}
        self._free_rows: list[int] = []
        self.blocks = np.zeros((num_groups, 0, 8), np.int32)  # [groups, rows, width]
        self.first_block = np.zeros(
            (num_groups, 0), np.int64
        )  # [groups, rows], blocks before it are released
        self.num_blocks = np.zeros(0, np.int64)  # [rows], released ones included
        self.seq_len = np.zeros(0, np.int64)  # [rows], tokens with a slot

    def open(self, seq_id: Hashable) -> int:
        """A row of length 0 for `seq_id`, which is not held."""
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        self.row_of[seq_id] = row
        self.first_block[:, row] = 0
        self.num_blocks[row] = 0
        self.seq_len[row] = 0
        return row

    def close(self, seq_id: Hashable) -> None:
        self._free_rows.append(self.row_of.pop(seq_id))

    def row(self, seq_id: Hashable) -> int:
        try:
            return self.row_of[seq_id]
        except KeyError:
            raise UnknownSequenceError(seq_id) from None

    def rows(self, seq_ids: Sequence[Hashable]) -> np.ndarray:
        """Row of each of the distinct sequences, [len(seq_ids)] int64."""
        row_of = self.row_of
        try:
            rows = [row_of[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise UnknownSequenceError(error.args[0]) from None
        if len(set(rows)) != len(rows):
            twice = next(seq_id for i, seq_id in enumerate(seq_ids) if seq_id in seq_ids[:i])
            raise DuplicateSequenceError(twice, "is named twice in one call")
        return np.array(rows, np.int64)

    def held(self, group: int, row: int) -> np.ndarray:
        """The blocks that the row holds in the group, in order: a view, [n] int32."""
        return self.blocks[group, row, self.first_block[group, row] : self.num_blocks[row]]

    def reserve_width(self, width: int) -> None:
        """Makes room for tables of `width` blocks, at least doubling, so that growth costs O(1) an
        entry."""
        groups, rows, old = self.blocks.shape
        if width > old:
            wider = np.zeros((groups, rows, max(width, 2 * old)), np.int32)
            wider[:, :, :old] = self.blocks
            self.blocks = wider

    def _add_rows(self) -> None:
        old = self.blocks.shape[1]
        new = max(8, 2 * old)

        def grown(array: np.ndarray, axis: int) -> np.ndarray:
            pad = [(0, new - old if i == axis else 0) for i in range(array.ndim)]
            return np.pad(array, pad)

        self.blocks = grown(self.blocks, 1)
        self.first_block = grown(self.first_block, 1)
        self.num_blocks = grown(self.num_blocks, 0)
        self.seq_len = grown(self.seq_len, 0)
        self._free_rows.extend(range(new - 1, old - 1, -1))
