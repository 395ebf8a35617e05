"""Admission: does a prompt fit, how much of it is cached, and what is remembered of one that must come again.

needed + pinned <= available,   needed = most blocks that the prompt holds at a time - blocks found,
                                pinned = blocks found that were evictable and would be so no more
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .chain import ContentKey, TokenChain, root_digest
from .pool import BlockPool
from .prefix import Match, PrefixCache
from .tables import SequenceTables

REMEMBERED = 1024  # prompts refused or preempted whose digests are kept, so that a retry hashes nothing again


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
class _Remembered:
    chain: TokenChain
    preempted: bool


class Admissions:
    def __init__(
        self,
        pool: BlockPool,
        tables: SequenceTables,
        prefix: PrefixCache | None,
        windows: tuple[int | None, ...],
        identity: str,
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.prefix = prefix
        self.windows = windows
        self.identity = identity
        self.root = root_digest(identity, tables.block_size, ())  # of sequences without keys
        self.remembered: dict[Hashable, _Remembered] = {}

    def most_blocks(
        self, num_tokens: int, chunk_size: int | None, first: Sequence[int] | None = None
    ) -> list[int]:
        """Most blocks that each group holds at a time while a prompt is prefilled from place first[g] on."""
        size = self.tables.block_size
        most = []
        for window, start in zip(self.windows, first or [0] * len(self.windows), strict=True):
            num_blocks = self.tables.blocks_for(num_tokens) - start
            if window is not None and chunk_size is not None:
                # A window and a chunk, wherever they begin in a block.
                num_blocks = min(num_blocks, (window - 1 + chunk_size + size - 2) // size + 1)
            most.append(num_blocks)
        return most

    def find_fitting(self, chain: TokenChain, num_tokens: int, chunk_size: int | None) -> Match | None:
        """The longest cached prefix with which the prompt fits now; None if it doesn't."""
        candidates = [Match.empty(len(self.windows))]
        if self.prefix is not None and chain.prompt:
            match = self.prefix.find(chain, (num_tokens - 1) // self.tables.block_size)
            left = num_tokens - 1 - match.num_blocks * self.tables.block_size
            longer = self.prefix.extend_partially(chain, match, left)
            candidates = [match] if longer is match else [longer, match]
        for match in candidates:
            # A partial hit is held, and a block for its copy needed too.
            found = [len(blocks) - (match.num_partial_tokens > 0) for blocks in match.blocks]
            most = self.most_blocks(num_tokens, chunk_size, match.first)
            needed = sum(max(0, m - f) for m, f in zip(most, found, strict=True))
            pinned = 0
            if match.num_blocks:
                pinned = int(np.count_nonzero(self.pool.refs[match.flat_blocks()] == 0))
            if needed + pinned <= self.pool.num_available:
                return match
        return None

    # Chains of prompts, and those that are kept for another try

    def chain(self, prompt: bytes, keys: Sequence[ContentKey]) -> TokenChain:
        size = self.tables.block_size
        root = root_digest(self.identity, size, keys) if keys else self.root
        # Without a prefix cache too: an exported sequence takes root and keys along.
        return TokenChain(root, size, b"" if self.prefix is None else prompt, keys)

    def recall(self, seq_id: Hashable, chain: TokenChain) -> bool:
        """Gives the chain the digests known from an earlier try; tells whether the sequence was preempted."""
        known = self.remembered.get(seq_id)
        if known is None:
            return False
        shared = min(len(chain.prompt), len(known.chain.prompt))
        if (
            known.chain.root == chain.root
            and known.chain.keys == chain.keys
            and known.chain.prompt[:shared] == chain.prompt[:shared]
        ):
            chain.digests = known.chain.digests[: shared // chain.block_bytes]
        return known.preempted

    def remember(self, seq_id: Hashable, chain: TokenChain, preempted: bool) -> None:
        self.remembered.pop(seq_id, None)
        self.remembered[seq_id] = _Remembered(chain, preempted)
        if len(self.remembered) > REMEMBERED:
            del self.remembered[next(iter(self.remembered))]

    def remember_held(self, seq_id: Hashable, row: int) -> None:
        """Remembers a sequence about to be preempted, under the tokens that it holds now."""
        tables, chain = self.tables, self.tables.chains[row]
        group = int(tables.first_block[:, row].argmin())
        if self.prefix is not None and tables.first_block[group, row] == 0:
            known = int(min(tables.seq_len[row], tables.known_len[row]))
            blocks = tables.blocks[group, row, : tables.blocks_for(known)]
            held = self.prefix.tokens[blocks].reshape(-1)[:known].tobytes()
            shared = min(len(held), len(chain.prompt))
            if held[:shared] != chain.prompt[:shared]:
                del chain.digests[int(tables.num_named[row]) :]  # those of tokens that were never appended
                chain.prompt = held
            elif len(held) > shared:
                chain.prompt = held
        self.remember(seq_id, chain, preempted=True)
