"""The pool: which blocks are free, which are cached without a holder, and how many hold each of the others.

Every block is in exactly one of three states:

    free        nobody holds it and nobody can find it
    evictable   nobody holds it, but the prefix cache still finds its content: handed out when nothing is free
    in use      ref_count >= 1 holders (sequences, pins)

Invariants, which `check` verifies:

    num_free + num_evictable + num_in_use = num_blocks
    is_free[b] or b is in the queue  =>  ref_count[b] = 0,  and never both
    num_shared = number of blocks with more than one holder,  num_holdings = sum of ref_count
    extent_free[e] = number of free blocks in extent e
    e in whole  <=>  all blocks of e are free;   0 < extent_free[e] < size of e  =>  e in broken

Blocks are handed out in runs of consecutive ids: the pool is cut into extents of RUN blocks, a sequence starts in a
whole extent and grows into its rest, and broken extents are used up only when no whole one is left. Each step is O(1)
per block. Lists are emptied lazily: an entry that is no longer true is dropped when it comes up.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

import numpy as np

from .._manager import PoolArrays

RUN = 16  # blocks an extent: long enough to join copies and reads, short enough to leave little room unused


class BlockPool:
    """`num_blocks` blocks with reference counts. Callers ask for no more than `num_available`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_evictable = 0
        self.num_shared = 0
        self.num_holdings = 0
        self.on_evict: Callable[[np.ndarray], None] = lambda blocks: None
        # [num_blocks] each; an array and a numpy view of its memory, as single items are cheaper to reach
        # in the array.
        self.ref_count = array("i", bytes(4 * num_blocks))
        self.refs = np.frombuffer(self.ref_count, np.int32)
        self.is_free = bytearray(b"\1" * num_blocks)
        # The prefix cache finds it: when let go it becomes evictable. The cache sets and clears this.
        self.is_cached = bytearray(num_blocks)
        self.cached = np.frombuffer(self.is_cached, np.bool_)
        # How often a block was handed out, so that someone who remembers it can tell whether it is still the
        # same.
        self.generation = array("i", bytes(4 * num_blocks))
        self.generations = np.frombuffer(self.generation, np.int32)
        # Extents. `whole` is a stack that pops ascending ids at first; `broken` is used oldest first.
        num_extents = -(-num_blocks // RUN)
        self._extent_size = array("i", [min(RUN, num_blocks - RUN * e) for e in range(num_extents)])
        self._extent_free = array("i", self._extent_size)
        self._whole = list(range(num_extents - 1, -1, -1))
        self._broken: deque[int] = deque()
        self._in_broken = bytearray(num_extents)
        # Least recently used order: a block is in the queue at place p if and only if place[b] = p; other
        # entries are stale.
        self._queue = array("i", bytes(4 * 2 * num_blocks))
        self._queue_view = np.frombuffer(self._queue, np.int32)
        self._head = self._tail = 0
        self._place = array("q", [-1]) * num_blocks
        self._places = np.frombuffer(self._place, np.int64)
        cached = np.frombuffer(self.is_cached, np.uint8)
        self._arrays = PoolArrays(self.refs, cached, self._queue_view, self._places)

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_evictable

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free - self.num_evictable

    # Handing out

    def take(self, count: int, after: int = -1) -> np.ndarray:
        """`count` blocks with one holder each, [count] int32: those after `after` if they are free, else runs, else
        evicted ones."""
        ids = self._take_free(count, after) if self.num_free else []
        taken = np.array(ids, np.int32)
        if len(ids) < count:
            # Ends of chains come first in the queue, so a chain's ids fall; sorting turns them into runs.
            evicted = np.sort(self._evict(count - len(ids)))
            taken = np.concatenate([taken, evicted]) if ids else evicted
        self.refs[taken] = 1
        self.generations[taken] += 1
        self.num_holdings += count
        return taken

    def _take_free(self, count: int, after: int) -> list[int]:
        """Up to `count` free blocks, as `take` chooses them."""
        is_free, extent_free = self.is_free, self._extent_free
        block = after + 1
        ids: list[int] = []
        while after >= 0 and len(ids) < count and block % RUN and block < self.num_blocks and is_free[block]:
            is_free[block] = 0
            extent_free[block // RUN] -= 1
            ids.append(block)
            block += 1
        while len(ids) < count and self._whole:
            extent = self._whole.pop()
            first = extent * RUN
            taken = min(self._extent_size[extent], count - len(ids))
            is_free[first : first + taken] = bytes(taken)
            extent_free[extent] -= taken
            self._note_broken(extent)
            ids.extend(range(first, first + taken))
        while len(ids) < count and self._broken:
            extent = self._broken[0]
            first = extent * RUN
            for block in range(first, first + self._extent_size[extent]):
                if is_free[block] and len(ids) < count:
                    is_free[block] = 0
                    extent_free[extent] -= 1
                    ids.append(block)
            if not extent_free[extent]:
                self._broken.popleft()
                self._in_broken[extent] = 0
        self.num_free -= len(ids)
        return ids

    def take_each(self, after: list[int]) -> list[int]:
        """One block after each of `after`, as `take(1, after)` gives it, quicker: what sequences grow by."""
        is_free, extent_free, extent_size = self.is_free, self._extent_free, self._extent_size
        ids: list[int] = []
        for block in after:
            block += 1
            extent = block // RUN
            if not self.num_free:
                break
            if (
                block % RUN
                and block < self.num_blocks
                and is_free[block]
                and extent_free[extent] < extent_size[extent]
            ):
                is_free[block] = 0
                extent_free[extent] -= 1
                self.num_free -= 1
                ids.append(block)
            else:
                ids += self._take_free(1, -1)
        if len(ids) < len(after):
            ids += self._evict(len(after) - len(ids)).tolist()
        ref_count, generation = self.ref_count, self.generation
        for block in ids:
            ref_count[block] = 1
            generation[block] += 1
        self.num_holdings += len(ids)
        return ids

    def hold(self, ids: np.ndarray) -> None:
        """One more holder for each of the distinct blocks `ids`, in use or evictable."""
        if not len(ids):
            return
        refs = self.refs[ids]
        unheld = ids[refs == 0]
        self._places[unheld] = -1
        self.num_evictable -= len(unheld)
        self.num_shared += int(np.count_nonzero(refs == 1))
        self.num_holdings += len(ids)
        self.refs[ids] = refs + 1

    def drop(self, ids: np.ndarray) -> None:
        """One holder less for each of the distinct blocks `ids`; what nobody holds is evictable or free, in
        this order."""
        if self._tail + len(ids) > len(self._queue):
            self._compact()
        num_shared_less, tail, freed = self._arrays.drop(ids, self._tail)
        self.num_shared -= num_shared_less
        self.num_holdings -= len(ids)
        self.num_evictable += tail - self._tail
        self._tail = tail
        self._give_back(freed)

    def uncache(self, block: int) -> None:
        """The prefix cache no longer finds `block`, which it did: if nobody holds it, it is free."""
        if not self.ref_count[block]:
            self._place[block] = -1
            self.num_evictable -= 1
            self._give_back([block])

    # The free lists

    def _note_broken(self, extent: int) -> None:
        if not self._in_broken[extent] and self._extent_free[extent]:
            self._in_broken[extent] = 1
            self._broken.append(extent)

    def _give_back(self, ids: list[int]) -> None:
        for block in ids:
            extent = block // RUN
            self.is_free[block] = 1
            self._extent_free[extent] += 1
            if self._extent_free[extent] == self._extent_size[extent]:
                self._whole.append(extent)
            else:
                self._note_broken(extent)
        self.num_free += len(ids)

    # The queue of evictable blocks

    def _compact(self) -> None:
        """Moves the true entries to the front. Frees at least half the queue, so each entry pays for O(1) of it."""
        ids = np.array(self.evictable(), np.int64)
        self._head, self._tail = 0, len(ids)
        self._queue_view[: len(ids)] = ids
        self._places[ids] = np.arange(len(ids))

    def _evict(self, count: int) -> np.ndarray:
        """Takes the `count` least recently used ones, in that order: [count] int32."""
        evicted, self._head = self._arrays.take_oldest(self._head, count)
        self.num_evictable -= count
        self.on_evict(evicted)
        return evicted

    def evictable(self) -> list[int]:
        """The evictable blocks, least recently used first."""
        entries = self._queue_view[self._head : self._tail]
        return entries[self._places[entries] == np.arange(self._head, self._tail)].tolist()

    # Proof

    def check(self, holders: np.ndarray) -> None:
        """Verifies the invariants of the head comment, and ref_count = `holders` (counted by the caller,
        [num_blocks])."""
        free = np.frombuffer(self.is_free, np.bool_)
        evictable = np.zeros(self.num_blocks, np.bool_)
        evictable[self.evictable()] = True
        expect((self.refs == holders).all(), "ref_count = number of holders")
        expect(self.num_shared == (holders > 1).sum(), "num_shared counts the blocks with several holders")
        expect(self.num_holdings == holders.sum(), "num_holdings sums the holders")
        expect(
            (free.astype(int) + evictable + (holders > 0) == 1).all(), "each block is in exactly one state"
        )
        expect(free.sum() == self.num_free, "num_free counts the free blocks")
        expect(evictable.sum() == self.num_evictable, "num_evictable counts the evictable blocks")
        expect(not (self.cached & free).any(), "a free block is not cached")
        expect(self.cached[evictable].all(), "an evictable block is cached")
        whole, broken = set(self._whole), set(self._broken)
        expect(
            len(whole) == len(self._whole) and len(broken) == len(self._broken), "an extent is listed once"
        )
        for extent, size in enumerate(self._extent_size):
            count = int(free[extent * RUN : extent * RUN + size].sum())
            expect(count == self._extent_free[extent], "extent_free counts the free blocks of the extent")
            expect((extent in whole) == (count == size), "whole lists the extents that are all free")
            expect(extent in broken or count in (0, size), "broken lists the extents that are partly free")
            expect((extent in broken) == bool(self._in_broken[extent]), "in_broken marks what broken lists")


def expect(condition: bool, rule: str) -> None:
    if not condition:
        raise AssertionError(f"broken invariant: {rule}")
