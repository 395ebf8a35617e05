"""Handover: a sequence or a prefix cache without its block ids, and how a manager takes it in.

What is handed over is named by digests, so that a manager holds again what it has already and asks for the rest to be
filled. transfer.py adds the tensors and the file.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from ..errors import DuplicateSequenceError, OutOfBlocksError, TransferMismatchError
from .chain import ContentKey, TokenChain
from .manager import PagedKVCacheManager
from .tables import UNLIMITED, SavedRow

Fills = list[tuple[int, int]]
"""(entry, block): the block must be given the content of that entry of what is taken in."""


@dataclass(frozen=True)
class SequenceState:
    """The computed tokens of a sequence. Entries are its blocks, group by group, in the order of places."""

    tokens: np.ndarray  # [n] int32; 0 where the id is not known
    known_len: int  # tokens before the first one whose id is not known
    root: bytes  # what the chain of digests starts from
    digests: list[bytes]  # of the full blocks among the known tokens
    keys: tuple[ContentKey, ...]  # those that belong to some tokens only
    first_block: list[int]  # [groups] place of each group's first entry


@dataclass(frozen=True)
class CachedBlocks:
    """Entries of a prefix cache, the least recently used first."""

    groups: np.ndarray  # [n] uint8
    digests: list[bytes]
    parents: list[bytes]  # digest of what precedes each block
    tokens: np.ndarray  # [n, block_size] int32


def describe_sequence(manager: PagedKVCacheManager, seq_id: Hashable) -> tuple[SequenceState, list[int]]:
    """The sequence's computed part, and the block of each entry."""
    manager._publisher.publish()
    tables, size = manager._tables, manager.block_size
    row = tables.row(seq_id)
    length = int(tables.computed_len[row])
    first, stop = tables.first_block[:, row].tolist(), tables.blocks_for(length)
    tokens = np.zeros(stop * size, np.int32)
    group = first.index(min(first))
    if manager._prefix is not None:
        blocks = tables.blocks[group, row, first[group] : stop]
        tokens[first[group] * size :] = manager._prefix.tokens[blocks].reshape(-1)
    chain, num_named = tables.chains[row], int(tables.num_named[row])
    known = min(length, int(tables.known_len[row])) if manager._prefix is not None else 0
    tokens[known:] = 0  # else those of a block's former holders would go with it
    state = SequenceState(tokens[:length], known, chain.root, chain.digests[:num_named], chain.keys, first)
    return state, [b for g, start in enumerate(first) for b in tables.blocks[g, row, start:stop].tolist()]


def take_sequence(manager: PagedKVCacheManager, seq_id: Hashable, state: SequenceState) -> Fills:
    """Opens `seq_id` with that content, computed and published; returns what has to be filled.

    Raises DuplicateSequenceError, OutOfBlocksError, and TransferMismatchError if the digests are not those of the
    tokens; nothing has changed then.
    """
    manager._publisher.publish()
    tables, pool, prefix, size = manager._tables, manager._pool, manager._prefix, manager.block_size
    if seq_id in tables:
        raise DuplicateSequenceError(seq_id, "is admitted already")
    chain = TokenChain(state.root, size, b"", state.keys)
    start = min(
        *state.first_block, len(state.digests)
    )  # what is before has no block here to be hashed again from
    chain.digests = state.digests[:start]
    chain.extend(state.tokens.tobytes(), start, len(state.digests) - start)
    if chain.digests != state.digests:
        raise TransferMismatchError("digests", "those of the tokens", "others")
    num_named = len(chain.digests) if prefix is not None else 0
    stop = tables.blocks_for(len(state.tokens))
    entries = [
        (group, place) for group, first in enumerate(state.first_block) for place in range(first, stop)
    ]
    found = [
        prefix.index.get(group, chain.digests[place]) if place < num_named else None
        for group, place in entries
    ]
    held = np.array([block for block in found if block is not None], np.int64)
    missing = [i for i, block in enumerate(found) if block is None]
    needed = len(missing) + int(np.count_nonzero(pool.refs[held] == 0))
    if needed > pool.num_available:
        raise OutOfBlocksError(needed, pool.num_available)

    pool.hold(held)
    fills = list(zip(missing, pool.take(len(missing)).tolist(), strict=True))
    blocks: list[list[int]] = [[] for _ in state.first_block]
    taken = dict(fills)
    for i, (group, _) in enumerate(entries):
        blocks[group].append(taken.get(i, found[i]))
    known = UNLIMITED if state.known_len == len(state.tokens) else state.known_len
    first = np.array(state.first_block, np.int64)
    tables.restore(
        seq_id, SavedRow(len(state.tokens), len(state.tokens), known, num_named, first, blocks, chain)
    )
    for group, held_blocks in enumerate(blocks):
        manager._recorder.held(seq_id, group, state.first_block[group], held_blocks)
    if prefix is not None:
        padded = np.zeros((stop, size), np.int32)
        padded.reshape(-1)[: len(state.tokens)] = state.tokens
        for i, block in fills:
            group, place = entries[i]
            prefix.tokens[block] = padded[place]
            if place < num_named:
                prefix.store(chain, group, [block], place)
    return fills


def describe_cache(manager: PagedKVCacheManager) -> tuple[CachedBlocks, list[int]]:
    """What the prefix cache holds, and the block of each entry; blocks that keys lie within are left out."""
    manager._publisher.publish()
    prefix = manager._prefix
    idle = manager._pool.evictable()
    in_use = np.flatnonzero(manager._pool.cached & (manager._pool.refs > 0)).tolist()
    entries = [
        block
        for block in idle + in_use
        if _digest(manager, prefix.parents[block].tobytes(), prefix.tokens[block]) == prefix.digest_of(block)
    ]
    cached = CachedBlocks(
        prefix.groups[entries],
        [prefix.digest_of(block) for block in entries],
        [prefix.parents[block].tobytes() for block in entries],
        prefix.tokens[entries],
    )
    return cached, entries


def take_cache(manager: PagedKVCacheManager, cached: CachedBlocks) -> Fills:
    """Publishes as many of the entries as there are free blocks, the most recently used ones; returns the fills.

    What is cached already stays as it is, and nothing is evicted. Raises TransferMismatchError if a digest is not that
    of its tokens; nothing has changed then.
    """
    manager._publisher.publish()
    pool, prefix = manager._pool, manager._prefix
    wanted = []
    for i, (group, digest) in enumerate(zip(cached.groups.tolist(), cached.digests, strict=True)):
        if _digest(manager, cached.parents[i], cached.tokens[i]) != digest:
            raise TransferMismatchError("digests", "those of the tokens", "others")
        if prefix.index.get(group, digest) is None:
            wanted.append(i)
    wanted = wanted[max(0, len(wanted) - pool.num_free) :]
    fills = list(zip(wanted, pool.take(len(wanted)).tolist(), strict=True))
    for i, block in fills:
        chain = TokenChain(cached.parents[i], manager.block_size, b"", ())
        chain.digests = [cached.digests[i]]
        prefix.tokens[block] = cached.tokens[i]
        prefix.store(chain, int(cached.groups[i]), [block], 0)
    pool.drop(np.array([block for _, block in fills], np.int64))
    return fills


def _digest(manager: PagedKVCacheManager, parent: bytes, tokens: np.ndarray) -> bytes:
    chain = TokenChain(parent, manager.block_size, b"", ())
    chain.extend(tokens.tobytes(), 0, 1)
    return chain.digests[0]
