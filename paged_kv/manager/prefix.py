"""The prefix cache: finds the blocks that hold a prompt's beginning already.

    blocks[group][digest] = b   <=>   is_cached[b], digest_of[b] = digest, group_of[b] = group
    digest_of[b] is the chain digest of tokens[b] after parent_of[b]     for cached b; else it is an old one

`tokens` shadows the cache tensors, one id where they have a key and a value: a slot's token is written there when the
slot is given out and moves with every block copy. It is what a full block is hashed from and a hit is verified with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
        self.blocks: list[dict[bytes, int]] = [{} for _ in windows]
        self.digest_of: list[bytes | None] = [None] * pool.num_blocks
        self.parent_of: list[bytes | None] = [None] * pool.num_blocks  # the digest, or root, before digest_of
        self.group_of = bytearray(pool.num_blocks)
        self.tokens = np.zeros((pool.num_blocks, block_size), np.int32)
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
            blocks = [cached.get(digest) for cached in self.blocks]
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
        lookups = [
            (self.blocks[g].get, found[g].append) for g, window in enumerate(self.windows) if window is None
        ]
        missed = False
        while count < limit and not missed:
            if count == len(digests):
                chain.extend_from_prompt(min(LOOKUP_STRIDE, limit - count))
            for digest in digests[count:limit]:
                for get, append in lookups:
                    block = get(digest)
                    if block is None:
                        missed = True
                        break
                    append(block)
                if missed:
                    break
                count += 1
        for group, window in enumerate(self.windows):
            if window is None and count:
                count = min(count, self._verified(chain, found[group][:count]))
        return found, count

    def _present(self, chain: TokenChain, group: int, count: int) -> list[int]:
        """The group's block at each of the first `count` places, -1 where there is none."""
        get = self.blocks[group].get
        blocks = np.array([get(digest, -1) for digest in chain.digests[:count]], np.int64)
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

    def store(self, chain: TokenChain, group: int, blocks: list[int], start: int) -> list[tuple[int, int]]:
        """Publishes `blocks`, which hold the chain's places from `start` on, under their digests.

        Returns (place, block) of those whose content the cache holds already in another block.
        """
        is_cached, digest_of, parent_of = self.pool.is_cached, self.digest_of, self.parent_of
        digests = chain.digests[start : start + len(blocks)]
        parents = [chain.parent(start), *digests]
        cached = map(self.blocks[group].setdefault, digests, blocks)
        twins, fresh = [], []
        for place, (block, known, digest, parent) in enumerate(
            zip(blocks, cached, digests, parents, strict=False), start
        ):
            if known != block:
                twins.append((place, known))
            elif not is_cached[block]:
                digest_of[block] = digest
                parent_of[block] = parent
                is_cached[block] = 1
                self.group_of[block] = group
                fresh.append(place)
        self.recorder.counters.stored += len(fresh)
        if self.continuations is not None:
            for place in fresh:
                self._note_continuation(chain, place)
        if self.recorder.subscribers:
            for place in fresh:
                block = blocks[place - start]
                tokens = tuple(self.tokens[block].tolist())
                self.recorder.emit(Stored(group, block, chain.digests[place], chain.parent(place), tokens))
        return twins

    def forget(self, blocks: list[int]) -> None:
        """The content of these blocks is no longer found; `is_cached` is the pool's to clear."""
        digest_of, group_of, cached_in = self.digest_of, self.group_of, self.blocks
        for block in blocks:
            del cached_in[group_of[block]][digest_of[block]]
        self.recorder.counters.evicted += len(blocks)
        if self.continuations is not None:
            for block in blocks:
                if not any(digest_of[block] in cached for cached in cached_in):
                    self._forget_continuation(self.parent_of[block], digest_of[block])
        if self.recorder.subscribers:
            for block in blocks:
                self.recorder.emit(Evicted(group_of[block], block, digest_of[block]))

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
        for group, cached in enumerate(self.blocks):
            for digest, block in cached.items():
                expect(self.digest_of[block] == digest, "a block is found under its own digest")
                expect(self.group_of[block] == group, "a block is found in its own group")
                expect(self.pool.is_cached[block], "is_cached marks the blocks that are found")
        expect(int(self.pool.cached.sum()) == sum(map(len, self.blocks)), "and no others")
        for parent, siblings in (self.continuations or {}).items():
            for digest in siblings:
                blocks = [cached[digest] for cached in self.blocks if digest in cached]
                expect(blocks, "a continuation is cached")
                expect(
                    {self.parent_of[block] for block in blocks} == {parent},
                    "a continuation's parent is its own",
                )

    def check_sequence(self, tables: SequenceTables, row: int) -> None:
        """Verifies that the row's named blocks are found under its chain's digests; hashes these again."""
        chain, num_named = tables.chains[row], int(tables.num_named[row])
        again = TokenChain(chain.root, self.block_size, b"", chain.keys)
        for group, first in enumerate(tables.first_block[:, row].tolist()):
            blocks = tables.blocks[group, row, first:num_named].tolist()
            found = [self.blocks[group].get(digest) for digest in chain.digests[first:num_named]]
            expect(blocks == found, "a named block is the one found under its digest")
            again.digests = chain.digests[:first]
            again.extend(self.tokens[blocks].tobytes(), 0, len(blocks))
            expect(again.digests == chain.digests[:num_named] or not blocks, "a digest is that of the tokens")
