"""The prefix cache: finds the blocks that hold a prompt's beginning already.

    index.get(group, digest) = b   <=>   is_cached[b], digests[b] = digest, groups[b] = group
    digests[b] is the chain digest of tokens[b] after parents[b]     for cached b; else it is an old one

The index is a hash table in csrc/prefix over the arrays here: what is done for every block of a prompt is done there.

`tokens` shadows the cache tensors, one id where they have a key and a value: a slot's token is written there when the
slot is given out and moves with every block copy. It is what a full block is hashed from and a hit is verified with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._manager import BlockIndex
from .chain import TokenChain
from .events import Evicted, Recorder, Stored
from .pool import BlockPool, expect
from .tables import SequenceTables

LOOKUP_STRIDE = 32  # blocks hashed at a time when a prompt is looked up: what is not found is published later
PARTIAL_CANDIDATES = 8  # blocks compared for a partial hit: the latest, so that the cost stays O(1)


@dataclass(frozen=True)
class Match:
    """A cached prefix of `num_blocks` blocks; `blocks[g]` are those of places first[g] to num_blocks."""

    num_blocks: int
    first: list[int]
    blocks: list[list[int]]
    num_partial_tokens: int = 0  # if not 0, only so many tokens of the last block are the prompt's

    @staticmethod
    def empty(num_groups: int) -> Match:
        return Match(0, [0] * num_groups, [[] for _ in range(num_groups)])

    def num_tokens(self, block_size: int) -> int:
        missing = block_size - self.num_partial_tokens if self.num_partial_tokens else 0
        return self.num_blocks * block_size - missing

    def flat_blocks(self) -> np.ndarray:
        """The blocks of all groups, [n] int64."""
        return np.array([block for blocks in self.blocks for block in blocks], np.int64)


class PrefixCache:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        windows: tuple[int | None, ...],
        recorder: Recorder,
        partial_hits: bool,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.windows = windows
        self.recorder = recorder
        num_blocks = pool.num_blocks
        self.digests = np.zeros((num_blocks, 32), np.uint8)
        self.parents = np.zeros((num_blocks, 32), np.uint8)  # the digest, or root, before `digests`
        self.groups = np.zeros(num_blocks, np.uint8)
        self.slots = np.zeros(2 << (num_blocks - 1).bit_length(), np.uint64)  # at most half of them in use
        cached = np.frombuffer(pool.is_cached, np.uint8)
        self.index = BlockIndex(self.slots, self.digests, self.parents, self.groups, cached)
        self.tokens = np.zeros((num_blocks, block_size), np.int32)
        self.token_at = self.tokens.reshape(-1)  # the same, by slot
        # For partial hits: parent digest -> digests that continue it, in the order in which they came.
        self.continuations: dict[bytes, dict[bytes, None]] | None = {} if partial_hits else None
        pool.on_evict = self.forget

    # Finding

    def find(self, chain: TokenChain, limit: int) -> Match:
        """The longest cached prefix of the chain's prompt, of at most `limit` blocks."""
        found, count = self._walk(chain, limit)
        if not count:
            return Match.empty(len(self.windows))
        num_blocks = count
        runs = []  # per window group: cached blocks in a row that end before each place
        for group, window in enumerate(self.windows):
            if window is not None:
                present = self._present(chain, group, count)
                found[group] = present
                run = [0]
                for block in present:
                    run.append(run[-1] + 1 if block >= 0 else 0)
                runs.append((window, run))
        while num_blocks and not all(
            run[num_blocks] >= num_blocks - self.first_needed(window, num_blocks * self.block_size)
            for window, run in runs
        ):
            num_blocks -= 1
        first = [self.first_needed(window, num_blocks * self.block_size) for window in self.windows]
        return Match(
            num_blocks, first, [blocks[f:num_blocks] for blocks, f in zip(found, first, strict=True)]
        )

    def extend_partially(self, chain: TokenChain, match: Match, max_tokens: int) -> Match:
        """`match` and a block of which 1 to `max_tokens` tokens go on with the prompt, if there is one."""
        place = match.num_blocks
        start = place * self.block_size
        prompt = np.frombuffer(chain.prompt, np.int32)
        want = prompt[start : start + min(max_tokens, self.block_size)]
        if self.continuations is None or not len(want) or chain.keys_within(place):
            return match
        best, length = None, 0
        siblings = self.continuations.get(chain.parent(place), {})
        for digest, _ in zip(reversed(siblings), range(PARTIAL_CANDIDATES), strict=False):
            blocks = [self.index.get(group, digest) for group in range(len(self.windows))]
            if None in blocks:
                continue
            same = int(np.logical_and.accumulate(self.tokens[blocks[0], : len(want)] == want).sum())
            if same > length:
                best, length = blocks, same
        if best is None:
            return match
        extended = [[*blocks, block] for blocks, block in zip(match.blocks, best, strict=True)]
        return Match(place + 1, match.first, extended, length)

    def first_needed(self, window: int | None, seq_len: int) -> int:
        """First place that the token after `seq_len` tokens can see."""
        return 0 if window is None else max(0, seq_len - window + 1) // self.block_size

    def _walk(self, chain: TokenChain, limit: int) -> tuple[list[list[int]], int]:
        """Blocks of the full-attention groups as far as all of them have one, and how many places that is."""
        digests, count = chain.digests, 0
        found: list[list[int]] = [[] for _ in self.windows]
        full = [group for group, window in enumerate(self.windows) if window is None]
        while count < limit:
            if count == len(digests):
                chain.extend_from_prompt(min(LOOKUP_STRIDE, limit - count))
            stop = min(limit, len(digests))
            for group in full:
                found[group] += self.index.find(group, digests, count, stop)
            count = min([stop, *(len(found[group]) for group in full)])
            if count < stop:
                break
        for group, window in enumerate(self.windows):
            if window is None and count:
                count = min(count, self._verified(chain, found[group][:count]))
        return found, count

    def _present(self, chain: TokenChain, group: int, count: int) -> list[int]:
        """The group's block at each of the first `count` places, -1 where there is none."""
        found = [self.index.get(group, digest) for digest in chain.digests[:count]]
        blocks = np.array([-1 if block is None else block for block in found], np.int64)
        return np.where(self._agree(chain, blocks), blocks, -1).tolist()

    def _verified(self, chain: TokenChain, blocks: list[int]) -> int:
        """How many of the blocks, from the first on, hold the prompt's own tokens."""
        if not blocks:
            return 0
        wrong = np.flatnonzero(~self._agree(chain, np.array(blocks, np.int64)))
        return int(wrong[0]) if len(wrong) else len(blocks)

    def _agree(self, chain: TokenChain, blocks: np.ndarray) -> np.ndarray:
        want = np.frombuffer(chain.prompt, np.int32, len(blocks) * self.block_size)
        return (self.tokens[blocks] == want.reshape(-1, self.block_size)).all(axis=1)

    # Storing and forgetting

    def store(
        self, chain: TokenChain, group: int, blocks: np.ndarray | list[int], start: int
    ) -> list[tuple[int, int]]:
        """Publishes `blocks`, which hold the chain's places from `start` on, under their digests.

        Returns (place, block) of those whose content the cache holds already in another block.
        """
        fresh, twins = self.index.store(group, chain.parent(start), chain.digests, start, blocks)
        self.recorder.counters.stored += len(fresh)
        if self.continuations is not None:
            for place in fresh:
                self._note_continuation(chain, place)
        if self.recorder.subscribers:
            for place in fresh:
                block = int(blocks[place - start])
                tokens = tuple(self.tokens[block].tolist())
                self.recorder.emit(Stored(group, block, chain.digests[place], chain.parent(place), tokens))
        return twins

    def forget(self, blocks: np.ndarray | list[int]) -> None:
        """The content of these cached blocks is no longer found."""
        self.index.remove(blocks)
        self.recorder.counters.evicted += len(blocks)
        if self.continuations is not None:
            for block in map(int, blocks):
                digest = self.digest_of(block)
                if all(self.index.get(group, digest) is None for group in range(len(self.windows))):
                    self._forget_continuation(self.parents[block].tobytes(), digest)
        if self.recorder.subscribers:
            for block in map(int, blocks):
                self.recorder.emit(Evicted(int(self.groups[block]), block, self.digest_of(block)))

    def digest_of(self, block: int) -> bytes:
        return self.digests[block].tobytes()

    def entries(self) -> dict[tuple[int, bytes], int]:
        """Everything that can be found: (group, digest) and its block."""
        return {
            (int(self.groups[block]), self.digest_of(block)): block
            for block in np.flatnonzero(self.pool.cached).tolist()
        }

    def _note_continuation(self, chain: TokenChain, place: int) -> None:
        if not (chain.keys and chain.keys_within(place)):
            self.continuations.setdefault(chain.parent(place), {})[chain.digests[place]] = None

    def _forget_continuation(self, parent: bytes, digest: bytes) -> None:
        siblings = self.continuations.get(parent, {})
        siblings.pop(digest, None)  # it isn't there if keys lie within the block
        if not siblings:
            self.continuations.pop(parent, None)

    # Proof

    def check(self) -> None:
        """Verifies the invariants above, but for what a digest is made from: see `check_sequence`."""
        entries = self.entries()
        expect(len(entries) == int(self.pool.cached.sum()), "no two blocks have one content")
        expect(int(np.count_nonzero(self.slots)) == len(entries), "the index has the cached blocks alone")
        for (group, digest), block in entries.items():
            expect(self.index.get(group, digest) == block, "a cached block is found under its digest")
        parents: dict[bytes, set[bytes]] = {}
        for (_, digest), block in entries.items():
            parents.setdefault(digest, set()).add(self.parents[block].tobytes())
        for parent, siblings in (self.continuations or {}).items():
            for digest in siblings:
                expect(digest in parents, "a continuation is cached")
                expect(parents[digest] == {parent}, "a continuation's parent is its own")

    def check_sequence(self, tables: SequenceTables, row: int) -> None:
        """Verifies that the row's named blocks are found under its chain's digests; hashes these again."""
        chain, num_named = tables.chains[row], int(tables.num_named[row])
        again = TokenChain(chain.root, self.block_size, b"", chain.keys)
        for group, first in enumerate(tables.first_block[:, row].tolist()):
            blocks = tables.blocks[group, row, first:num_named].tolist()
            found = [self.index.get(group, digest) for digest in chain.digests[first:num_named]]
            expect(blocks == found, "a named block is the one found under its digest")
            again.digests = chain.digests[:first]
            again.extend(self.tokens[blocks].tobytes(), 0, len(blocks))
            expect(again.digests == chain.digests[:num_named] or not blocks, "a digest is that of the tokens")
