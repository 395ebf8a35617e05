"""The beam step: rows go on from what other rows hold. Beams share most of it, so only what differs is counted.

    a block that a row names before and after   keeps that holder
    the others                                  first all new ones get a holder, then all old ones lose one

so what any of the rows goes on with is never free in between.
"""

from __future__ import annotations

import numpy as np

from .pool import BlockPool
from .tables import SequenceTables


def take_over(tables: SequenceTables, pool: BlockPool, rows: np.ndarray, parents: np.ndarray) -> None:
    """Each of the distinct `rows` holds what its row of `parents`, another one, held before the call: [n] each.

    Lookahead blocks stay with a parent that is none of `rows`, and are let go of otherwise.
    """
    old_stop = tables.num_blocks[rows]
    stop = -(-tables.seq_len[parents] // tables.block_size)
    width = int(max(old_stop.max(), stop.max()))
    places = np.arange(width)
    old, new = tables.blocks[:, rows, :width], tables.blocks[:, parents, :width]  # [groups, n, width]
    old_first, first = tables.first_block[:, rows], tables.first_block[:, parents]  # [groups, n]
    had = (places >= old_first[:, :, None]) & (places < old_stop[:, None])
    has = (places >= first[:, :, None]) & (places < stop[:, None])
    differs = (old != new) | (had != has)
    for ids in _distinct(new[has & differs].tolist()):
        pool.hold(ids)
    lost = had & differs
    # Row by row and the last place first, as they are let go of one by one.
    for ids in _distinct(old.transpose(1, 2, 0)[:, ::-1][lost.transpose(1, 2, 0)[:, ::-1]].tolist()):
        pool.drop(ids)

    tables.blocks[:, rows, :width] = new
    tables.first_block[:, rows] = first
    tables.num_blocks[rows] = stop
    for field in (tables.seq_len, tables.computed_len, tables.known_len, tables.num_named):
        field[rows] = field[parents]
    tables.room[rows] = tables.room[parents] = 0
    chains = [tables.chains[parent].copy() for parent in parents.tolist()]
    tables.chains.update(zip(rows.tolist(), chains, strict=True))


def _distinct(ids: list[int]) -> list[np.ndarray]:
    """`ids` as arrays of distinct ones, of which the last has each id, in the order in which they come last."""
    rounds: list[list[int]] = []
    num_later: dict[int, int] = {}
    for block in reversed(ids):
        later = num_later.get(block, 0)
        num_later[block] = later + 1
        if later == len(rounds):
            rounds.append([])
        rounds[later].append(block)
    return [np.array(blocks[::-1]) for blocks in reversed(rounds)]
