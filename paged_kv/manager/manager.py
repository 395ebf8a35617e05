"""The block manager: which block holds which token of which sequence. It touches no tensor.

A call returns what has to be done to the cache tensors (slots to write, block copies), and the caller lets
the ops do it, in the order of the calls and before the tokens of the step are written. Every call is all or
nothing: it plans first, raises or refuses there, and only then changes anything.

Invariants, which `check` verifies together with those of pool.py:

    ref_count[b] = number of sequences (and groups) whose table holds b
    blocks of a sequence in a group = ceil(seq_len / block_size), and lookahead blocks behind them
    only the block that holds a sequence's last token can both be shared and be written next: its first
    writer copies
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DuplicateSequenceError, OutOfBlocksError, SharedBlockError
from .pool import BlockPool
from .tables import SequenceTables

Tokens = Sequence[int] | np.ndarray | int
"""Token ids of one sequence (a list, an array, a CPU tensor), or only their number where ids are not
known."""


class AdmissionStatus(enum.Enum):
    ADMITTED = "admitted"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True)
class Admission:
    """Answer of `admit`. The sequence exists only where status is ADMITTED.

    ADMITTED: its first `num_cached_tokens` tokens are in the cache already; append the rest.
    LATER: the prompt does not fit beside what is held now.
    NEVER: the prompt does not fit in the whole pool.
    """

    status: AdmissionStatus
    num_cached_tokens: int = 0

    @property
    def admitted(self) -> bool:
        return self.status is AdmissionStatus.ADMITTED


@dataclass(frozen=True)
class Step:
    """Answer of `append`: first do the copies, then write the tokens to their slots.

    slot_mappings: [groups, T] int64, the slot of each new token, packed in the order of the call.
    block_copies: (source, destination) pairs for `copy_blocks`; no destination is a source.
    """

    slot_mappings: np.ndarray
    block_copies: list[tuple[int, int]]

    @property
    def slot_mapping(self) -> np.ndarray:
        """[T] int64: the slots of the first group, which is the only one unless layers are grouped."""
        return self.slot_mappings[0]


@dataclass(frozen=True)
class Stats:
    """What the pool's blocks are used for, in blocks and in token slots; exact at the moment of the
    call."""

    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_used_blocks: int
    num_shared_blocks: int  # used by more than one holder
    num_saved_blocks: int  # blocks that would be used beyond these if nothing were shared
    num_sequences: int
    num_used_slots: int  # slots of used blocks
    num_held_tokens: int  # of these, slots holding a token; a shared block counts once

    @property
    def waste(self) -> float:
        """Allocated slots holding no token, as a share of the allocated slots (0 where none are)."""
        return 1.0 - self.num_held_tokens / self.num_used_slots if self.num_used_slots else 0.0


class PagedKVCacheManager:
    """Block tables over a pool of `num_blocks` blocks of `block_size` slots.

    windows: one entry for each group of layers: None for full attention, else the sliding window in tokens.
    Every
        group has its own block table and draws on the same pool; a block serves the layers of one group.

    >>> m = PagedKVCacheManager(num_blocks=8, block_size=4)
    >>> m.admit("a", [11, 12, 13, 14, 15]).admitted
    True
    >>> m.append(["a"], [[11, 12, 13, 14, 15]]).slot_mapping.tolist()
    [0, 1, 2, 3, 4]
    >>> m.block_tables(["a"]).tolist()
    [[0, 1]]
    >>> m.free("a")
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, windows: Sequence[int | None] = (None,)
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if not windows or any(w is not None and w < 1 for w in windows):
            raise ValueError(
                f"windows must be None or at least 1 for each of one or more groups, not {windows!r}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self._pool = BlockPool(num_blocks)
        self._tables = SequenceTables(len(self.windows))

    # Sequences come and go

    def admit(self, seq_id: Hashable, tokens: Tokens) -> Admission:
        """Opens sequence `seq_id` if the prompt `tokens` (ids, or their number) fits now; see Admission.

        The sequence starts with its cached prefix only; `append` adds the other tokens, at once or in
        chunks. Raises DuplicateSequenceError if `seq_id` is held. Refusals change nothing.
        """
        if seq_id in self._tables.row_of:
            raise DuplicateSequenceError(seq_id, "is admitted already")
        needed = self._blocks_for(_num_tokens(tokens)) * len(self.windows)
        if needed > self.num_blocks:
            return Admission(AdmissionStatus.NEVER)
        if needed > self._pool.num_available:
            return Admission(AdmissionStatus.LATER)
        self._tables.open(seq_id)
        return Admission(AdmissionStatus.ADMITTED)

    def fork(self, seq_id: Hashable, child_id: Hashable) -> None:
        """Opens `child_id` with the same tokens as `seq_id`, sharing every block that holds one of them.

        Whoever appends first to a shared partial block gets a copy of it; lookahead blocks stay with the
        parent. Raises UnknownSequenceError, or DuplicateSequenceError if `child_id` is held.
        """
        tables = self._tables
        parent = tables.row(seq_id)
        if child_id in tables.row_of:
            raise DuplicateSequenceError(child_id, "is admitted already")
        child = tables.open(child_id)
        num_blocks = self._blocks_for(int(tables.seq_len[parent]))
        tables.blocks[:, child, :num_blocks] = tables.blocks[:, parent, :num_blocks]
        tables.first_block[:, child] = tables.first_block[:, parent]
        tables.num_blocks[child] = num_blocks
        tables.seq_len[child] = tables.seq_len[parent]
        for group in range(len(self.windows)):
            self._pool.hold(tables.held(group, child))

    def free(self, seq_id: Hashable) -> None:
        """Lets go of all blocks of `seq_id`. A second free raises UnknownSequenceError and changes
        nothing."""
        row = self._tables.row(seq_id)
        for group in range(len(self.windows)):
            # Backwards, so that the end of a chain is evicted before its beginning.
            self._pool.drop(self._tables.held(group, row)[::-1])
        self._tables.close(seq_id)

    # Sequences grow

    def append(
        self, seq_ids: Sequence[Hashable], tokens: np.ndarray | Sequence[Tokens], *, lookahead: int = 0
    ) -> Step:
        """Gives the next tokens of each of the distinct sequences their slots: one call for a whole batch.

        tokens: for each sequence its new token ids or, where they are not known, their number; or an
        integer array
            [S, n] of n ids for each, the quickest form (n = 1 for decode).
        lookahead: slots to have ready beyond the new tokens (drafts); they are not part of seq_len.

        Raises OutOfBlocksError (needed, free), UnknownSequenceError, DuplicateSequenceError; then nothing
        has changed for any sequence of the call.
        """
        tables, pool, size = self._tables, self._pool, self.block_size
        rows = tables.rows(seq_ids)
        counts = _parse_tokens(tokens, len(rows))
        old = tables.seq_len[rows]
        new = old + counts
        growth = -(-(new + lookahead) // size) - tables.num_blocks[rows]
        growing = np.flatnonzero(growth > 0)
        copies = self._plan_copies(rows[(old % size != 0) & (counts > 0)])
        needed = int(growth[growing].sum()) * len(self.windows) + len(copies)
        if needed > pool.num_available:
            raise OutOfBlocksError(needed, pool.num_available)

        for row, count in zip(rows[growing].tolist(), growth[growing].tolist(), strict=True):
            self._grow(row, count)
        block_copies = []
        for group, row, place in copies:
            source = int(tables.blocks[group, row, place])
            destination = pool.take(1)[0]
            tables.blocks[group, row, place] = destination
            block_copies.append((source, destination))
        for source, _ in block_copies:  # only now: no destination may be a source of the same step
            pool.drop(np.array([source]))
        tables.seq_len[rows] = new
        return Step(self._slots(rows, old, counts), block_copies)

    def allocate_token_slot(self, seq_id: Hashable, current_seq_len: int) -> int:
        """The block that holds token number `current_seq_len` (counted from 1) of `seq_id`, in the first
        group.

        The smallest useful call: number 1 of an unknown sequence opens it, and the number after its last
        token appends one, so that counting up gives each token its block. Raises ValueError for a number
        beyond that, OutOfBlocksError, and SharedBlockError where the append would need a block copy;
        nothing has changed then.
        """
        if current_seq_len < 1:
            raise ValueError(f"current_seq_len counts tokens from 1, not {current_seq_len}")
        tables, size = self._tables, self.block_size
        opened = current_seq_len == 1 and seq_id not in tables.row_of
        seq_len = 0 if opened else self.seq_len(seq_id)
        if current_seq_len > seq_len + 1:
            raise ValueError(
                f"current_seq_len of sequence {seq_id!r} must be at most {seq_len + 1}, not {current_seq_len}"
            )
        if current_seq_len == seq_len + 1:
            if opened:
                if self._pool.num_available < len(self.windows):
                    raise OutOfBlocksError(len(self.windows), self._pool.num_available)
                tables.open(seq_id)
            elif seq_len % size and (copies := self._plan_copies(np.array([tables.row_of[seq_id]]))):
                group, row, place = copies[0]
                raise SharedBlockError(seq_id, int(tables.blocks[group, row, place]))
            self.append([seq_id], [1])
        return int(tables.blocks[0, tables.row_of[seq_id], (current_seq_len - 1) // size])

    # Looking things up

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._tables.row_of

    def seq_len(self, seq_id: Hashable) -> int:
        """Tokens that have a slot."""
        return int(self._tables.seq_len[self._tables.row(seq_id)])

    def seq_lens(self, seq_ids: Sequence[Hashable]) -> np.ndarray:
        """Tokens that have a slot, [S] int32, as `paged_attention` takes them."""
        return self._tables.seq_len[self._tables.rows(seq_ids)].astype(np.int32)

    def block_tables(self, seq_ids: Sequence[Hashable], group: int = 0) -> np.ndarray:
        """Block table of each sequence in the group, [S, M] int32; M reaches to the longest (at least 1).

        Entries beyond a sequence's last block, or before its window, are valid block ids without meaning.
        """
        tables = self._tables
        rows = tables.rows(seq_ids)
        width = max(1, int(tables.num_blocks[rows].max(initial=0)))
        return tables.blocks[group][rows, :width]

    def slots(self, seq_ids: Sequence[Hashable], group: int = 0) -> np.ndarray:
        """Slot of every token of the sequences in the group, packed in order, [sum(seq_lens)] int64."""
        tables, size = self._tables, self.block_size
        rows = tables.rows(seq_ids)
        seq_lens = tables.seq_len[rows].tolist()
        slots = np.empty(sum(seq_lens), np.int64)
        offsets = np.arange(size)
        start = 0
        for row, seq_len in zip(rows.tolist(), seq_lens, strict=True):
            blocks = tables.blocks[group, row, : self._blocks_for(seq_len)].astype(np.int64)
            slots[start : start + seq_len] = (blocks[:, None] * size + offsets).reshape(-1)[:seq_len]
            start += seq_len
        return slots

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be handed out now: free ones and evictable ones."""
        return self._pool.num_available

    def stats(self) -> Stats:
        """Counts blocks and slots; costs O(sequences)."""
        pool, tables, size = self._pool, self._tables, self.block_size
        rows = np.fromiter(tables.row_of.values(), np.int64, len(tables.row_of))
        seq_len = tables.seq_len[rows]
        spare = (tables.num_blocks[rows] - -(-seq_len // size)).sum() * len(self.windows)
        empty = int(spare) * size
        fill = seq_len % size
        for blocks in tables.blocks:
            partial = fill > 0
            tails, index = np.unique(blocks[rows[partial], seq_len[partial] // size], return_inverse=True)
            fullest = np.zeros(len(tails), np.int64)
            np.maximum.at(fullest, index, fill[partial])
            # A holder for whom the block is not the last one has filled it.
            filled = np.bincount(index, minlength=len(tails)) < pool.refs[tails]
            empty += int((size - fullest)[~filled].sum())
        used_slots = pool.num_in_use * size
        return Stats(
            num_blocks=self.num_blocks,
            num_free_blocks=pool.num_free,
            num_evictable_blocks=pool.num_evictable,
            num_used_blocks=pool.num_in_use,
            num_shared_blocks=int((pool.refs > 1).sum()),
            num_saved_blocks=int(np.maximum(pool.refs - 1, 0).sum()),
            num_sequences=len(rows),
            num_used_slots=used_slots,
            num_held_tokens=used_slots - empty,
        )

    def check(self) -> None:
        """Verifies every invariant; raises AssertionError naming the broken one. Costs O(blocks), for
        tests."""
        tables = self._tables
        holders = np.zeros(self.num_blocks, np.int64)
        for seq_id, row in tables.row_of.items():
            seq_len, num_blocks = int(tables.seq_len[row]), int(tables.num_blocks[row])
            if self._blocks_for(seq_len) > num_blocks:
                raise AssertionError(f"sequence {seq_id!r}: {seq_len} tokens in {num_blocks} blocks")
            for group in range(len(self.windows)):
                held = tables.held(group, row)
                np.add.at(holders, held, 1)
                if len(np.unique(held)) != len(held):
                    raise AssertionError(f"sequence {seq_id!r} holds a block twice")
        self._pool.check(holders)

    # Steps of the calls above

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self, row: int, count: int) -> None:
        """`count` more blocks for the row in every group."""
        tables = self._tables
        start = int(tables.num_blocks[row])
        tables.reserve_width(start + count)
        for blocks in tables.blocks:
            last = int(blocks[row, start - 1]) if start else -1
            blocks[row, start : start + count] = self._pool.take(count, last)
        tables.num_blocks[row] = start + count

    def _plan_copies(self, rows: np.ndarray) -> list[tuple[int, int, int]]:
        """(group, row, place in the table) of each partial last block that its row must not write in place.

        rows: the sequences about to write into their partial last block.
        """
        tables = self._tables
        places = tables.seq_len[rows] // self.block_size
        plan = []
        for group, blocks in enumerate(tables.blocks):
            tails = blocks[rows, places]
            refs = self._pool.refs[tails]
            if (refs <= 1).all():
                continue
            holders: dict[int, int] = {}
            for row, place, block, count in zip(
                rows.tolist(), places.tolist(), tails.tolist(), refs.tolist(), strict=True
            ):
                left = holders.get(block, count)
                if left > 1:  # every holder but the last moves to a copy; the last one writes in place
                    holders[block] = left - 1
                    plan.append((group, row, place))
        return plan

    def _slots(self, rows: np.ndarray, old: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Slots of the `counts` tokens after the first `old` of each row, [groups, sum(counts)] int64."""
        size = self.block_size
        if (counts == 1).all():
            positions = old
        else:
            starts = np.cumsum(counts) - counts
            rows = np.repeat(rows, counts)
            positions = np.arange(len(rows)) + np.repeat(old - starts, counts)
        places, offsets = np.divmod(positions, size)
        return self._tables.blocks[:, rows, places].astype(np.int64) * size + offsets


def _num_tokens(tokens: Tokens) -> int:
    if isinstance(tokens, (int, np.integer)):
        if tokens < 0:
            raise ValueError(f"a number of tokens must be at least 0, not {tokens}")
        return int(tokens)
    return len(tokens)


def _parse_tokens(tokens: np.ndarray | Sequence[Tokens], num_seqs: int) -> np.ndarray:
    """Number of tokens for each sequence, [num_seqs] int64."""
    if len(tokens) != num_seqs:
        raise ValueError(
            f"tokens must have one entry for each of the {num_seqs} sequences, not {len(tokens)}"
        )
    if getattr(tokens, "ndim", 0) == 2:
        return np.full(num_seqs, tokens.shape[1], np.int64)
    return np.array([_num_tokens(entry) for entry in tokens], np.int64)
