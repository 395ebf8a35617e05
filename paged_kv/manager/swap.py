"""Swap: sequences move to host blocks and back, and what they share stays shared.

A host block and the device block it was copied from are twins while both keep that content. A twin needs no second
copy: sequences that share a block share its host block too, even when they leave one after the other, and a block that
stayed on the device, held by others or found by the prefix cache, is held again instead of copied back.

A partial block may be written to behind a sequence's tokens while it has a twin. A twin with fewer tokens than
another sequence has there is none to that one; a twin with more, those of a sequence that shared the block with one not
as long, is none from that write on.

    host_of[b] = h   <=>   device_of[h] = (b, generation of b when it was copied)
    ref_count[h] = number of entries of swapped sequences that name h
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

import numpy as np

from ..errors import (
    DuplicateSequenceError,
    OutOfBlocksError,
    OutOfHostBlocksError,
    ResidentSequenceError,
    UnknownSequenceError,
)
from .arguments import listing
from .pool import BlockPool, expect
from .prefix import PrefixCache
from .tables import SavedRow, SequenceTables

Pairs = list[tuple[int, int]]


class Swapper:
    def __init__(
        self, num_host_blocks: int, pool: BlockPool, tables: SequenceTables, prefix: PrefixCache | None
    ) -> None:
        self.host = BlockPool(num_host_blocks)
        self.pool = pool
        self.tables = tables
        self.prefix = prefix
        self.host_of: dict[int, int] = {}
        self.device_of: dict[int, tuple[int, int]] = {}
        self.num_filled = [0] * num_host_blocks  # tokens that each host block has for certain
        if prefix is not None:
            self.tokens = np.zeros((num_host_blocks, prefix.block_size), np.int32)

    def out(self, seq_ids: Sequence[Hashable]) -> Pairs:
        """Moves the sequences' entries to host blocks. Returns the (device, host) copies to make."""
        tables, host = self.tables, self.host
        rows = tables.rows(seq_ids).tolist()
        saved = [tables.save(row) for row in rows]
        num_filled = self._count_filled(saved)
        host_of = {block: self._host_twin(block, count) for block, count in num_filled.items()}
        missing = [block for block, twin in host_of.items() if twin is None]
        if len(missing) > host.num_available:
            raise OutOfHostBlocksError(len(missing), host.num_available)

        # One hold for the call while the entries are counted, as `take` gives one too.
        host.hold(np.array([twin for twin in host_of.values() if twin is not None], np.int64))
        taken = host.take(len(missing)).tolist()
        for block, twin in zip(missing, taken, strict=True):
            host_of[block] = twin
            self._join(block, twin)
            self.num_filled[twin] = num_filled[block]
        if self.prefix is not None:
            self.tokens[taken] = self.prefix.tokens[missing]
        for seq_id, row, entry in zip(seq_ids, rows, saved, strict=True):
            self.pool.drop(tables.held_backwards(row))
            tables.close(seq_id)
            entry.blocks = [[host_of[block] for block in blocks] for blocks in entry.blocks]
            host.hold(entry.flat_blocks())
            tables.away[seq_id] = entry
        host.drop(np.array(list(host_of.values()), np.int64))
        return list(zip(missing, taken, strict=True))

    def back(self, seq_ids: Sequence[Hashable]) -> Pairs:
        """Moves the sequences' entries to device blocks. Returns the (host, device) copies to make."""
        tables, host, pool = self.tables, self.host, self.pool
        listing("seq_ids", seq_ids, "a sequence of ids")
        saved = [self._saved(seq_id) for seq_id in seq_ids]
        if len(set(seq_ids)) != len(saved):
            twice = next(seq_id for i, seq_id in enumerate(seq_ids) if seq_id in seq_ids[:i])
            raise DuplicateSequenceError(twice, "is named twice in one call")
        # What each host block holds, and where that is or will be on the device; equal content meets in one
        # block.
        content_of: dict[int, object] = {}
        kept: dict[object, int] = {}
        fresh: dict[object, int] = {}
        for group, twin, digest in _entries(saved):
            if twin in content_of:
                continue
            content = content_of[twin] = twin if digest is None else (group, digest)
            block = self._device_twin(twin) if digest is None else self.prefix.index.get(group, digest)
            if block is None:
                fresh.setdefault(content, twin)
            else:
                kept[content] = block
        held = np.array(sorted(set(kept.values())), np.int64)
        needed = len(fresh) + int(np.count_nonzero(pool.refs[held] == 0))
        if needed > pool.num_available:
            raise OutOfBlocksError(needed, pool.num_available)

        pool.hold(held)
        taken = pool.take(len(fresh)).tolist()
        pairs = list(zip(fresh.values(), taken, strict=True))
        if self.prefix is not None:
            self.prefix.tokens[taken] = self.tokens[list(fresh.values())]
        kept.update(zip(fresh, taken, strict=True))
        for seq_id, entry in zip(seq_ids, saved, strict=True):
            twins = entry.flat_blocks()
            entry.blocks = [[kept[content_of[twin]] for twin in blocks] for blocks in entry.blocks]
            pool.hold(entry.flat_blocks())
            self._let_go(twins)
            del tables.away[seq_id]
            tables.restore(seq_id, entry)
            self._publish(entry, set(taken))
        for twin, block in pairs:
            if host.ref_count[twin]:  # other sequences on the host share it
                self._join(block, twin)
        pool.drop(held)
        pool.drop(np.array(taken, np.int64))
        return pairs

    def free(self, seq_id: Hashable) -> None:
        self._let_go(self.tables.away.pop(seq_id).flat_blocks())

    def _count_filled(self, saved: list[SavedRow]) -> dict[int, int]:
        """How many tokens the sequences have in each of their blocks."""
        size, num_filled = self.tables.block_size, {}
        for entry in saved:
            last = (entry.seq_len - 1) % size + 1
            for blocks in entry.blocks:
                num_filled.update(dict.fromkeys(blocks[:-1], size))
                for block in blocks[-1:]:
                    num_filled[block] = max(num_filled.get(block, 0), last)
        return num_filled

    def _saved(self, seq_id: Hashable) -> SavedRow:
        if seq_id not in self.tables:
            raise UnknownSequenceError(seq_id)
        if seq_id in self.tables.row_of:
            raise ResidentSequenceError(seq_id)
        return self.tables.away[seq_id]

    def _publish(self, entry: SavedRow, fresh: set[int]) -> None:
        for group, blocks in enumerate(entry.blocks):
            first = int(entry.first_block[group])
            for place, block in enumerate(blocks[: max(0, entry.num_named - first)], first):
                if block in fresh:
                    self.prefix.store(entry.chain, group, [block], place)

    def forget_names(self) -> None:
        """The prefix cache was reset: what the swapped sequences hold is not published again."""
        for entry in self.tables.away.values():
            entry.forget_names()

    def check(self) -> None:
        """Verifies the invariants of the head comment and those of the host's pool."""
        holders = np.zeros(self.host.num_blocks, np.int64)
        for entry in self.tables.away.values():
            np.add.at(holders, entry.flat_blocks(), 1)
        self.host.check(holders)
        expect(all(holders[twin] for twin in self.device_of), "a host block with a twin is held")
        for block, twin in self.host_of.items():
            expect(self.device_of.get(twin, (None, 0))[0] == block, "twins name each other")

    # Twins

    def note_write(self, block: int, offset: int) -> None:
        """The slots of `block` from `offset` on are about to be written."""
        twin = self.host_of.get(block)
        if twin is not None and self.num_filled[twin] > offset:
            self._part(twin)

    def _join(self, block: int, twin: int) -> None:
        self._part(twin)
        if block in self.host_of:
            self._part(self.host_of[block])
        self.host_of[block] = twin
        self.device_of[twin] = (block, self.pool.generation[block])

    def _part(self, twin: int) -> None:
        block, _ = self.device_of.pop(twin, (None, 0))
        if self.host_of.get(block) == twin:
            del self.host_of[block]

    def _host_twin(self, block: int, num_tokens: int) -> int | None:
        twin = self.host_of.get(block)
        if twin is None or self._device_twin(twin) != block or self.num_filled[twin] < num_tokens:
            return None
        return twin

    def _device_twin(self, twin: int) -> int | None:
        block, generation = self.device_of.get(twin, (None, 0))
        if block is None or self.pool.generation[block] != generation or self.pool.is_free[block]:
            return None
        return block

    def _let_go(self, twins: np.ndarray) -> None:
        self.host.drop(twins)
        for twin in twins.tolist():
            if not self.host.ref_count[twin]:
                self._part(twin)


def _entries(saved: list[SavedRow]) -> Iterator[tuple[int, int, bytes | None]]:
    """(group, host block, digest) of each entry; those that have a digest first, as it tells most."""
    named, unnamed = [], []
    for entry in saved:
        for group, blocks in enumerate(entry.blocks):
            for place, twin in enumerate(blocks, int(entry.first_block[group])):
                if place < entry.num_named:
                    named.append((group, twin, entry.chain.digests[place]))
                else:
                    unnamed.append((group, twin, None))
    return chain(named, unnamed)
