"""The names of full blocks: a SHA-256 chain, equal in every process.

    root      = sha256(identity of the cache | keys of the whole sequence)
    digest[i] = sha256(digest[i - 1], or root | tokens of block i as little-endian int32 | keys within block i)

so a digest names a block's tokens, everything before them and everything else that gave them their meaning. Fields of
variable length carry their length, so that no two different inputs become the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from .._arguments import check_integer
from .._manager import hash_blocks
from .arguments import instance, is_listing

BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class ContentKey:
    """Something that keys and values depend on and token ids do not tell.

    kind: "salt", "adapter", "media" or any other word: equal values of different kinds never meet.
    value: its name or content hash.
    start, stop: the tokens it belongs to, as an image's placeholder; without `stop`, the whole sequence.
    """

    kind: str
    value: str | bytes
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        instance("kind", self.kind, str, "text")
        instance("value", self.value, (str, bytes), "text or bytes")
        object.__setattr__(self, "start", check_integer("start", self.start, 0))
        if self.stop is not None:
            object.__setattr__(self, "stop", check_integer("stop", self.stop, 1))
        if self.start if self.stop is None else self.start >= self.stop:
            raise ValueError(
                f"start: expected less than stop, or 0 without a stop, got {self.start} and {self.stop}"
            )
        self.encode(0)  # raises here what could never be hashed

    def encode(self, first: int) -> bytes:
        """Kind, value and, unless it belongs to the whole sequence, its tokens counted from token `first`."""
        value = self.value.encode() if isinstance(self.value, str) else self.value
        span = b"" if self.stop is None else _number(self.start - first) + _number(self.stop - first)
        return _field(self.kind.encode()) + _field(value) + span


def content_keys(keys: Sequence[ContentKey]) -> Sequence[ContentKey]:
    """The argument `keys` of a call, if it is what it should be."""
    if not is_listing(keys) or not all(isinstance(key, ContentKey) for key in keys):
        raise TypeError(f"keys: expected a sequence of ContentKey, got {keys!r}")
    return keys


def root_digest(identity: str, block_size: int, keys: Sequence[ContentKey]) -> bytes:
    """What stands before the first block's digest, for a sequence with these keys."""
    header = _field(b"paged_kv") + _field(identity.encode()) + _number(block_size)
    return sha256(header + b"".join(sorted({key.encode(0) for key in keys if key.stop is None}))).digest()


class TokenChain:
    """The digests of one sequence's full blocks; each block is hashed once, when its name is first asked for.

    prompt: the tokens that admission knew, as int32 bytes: digests may be taken from it before its tokens
        have slots.
    """

    __slots__ = ("block_size", "digests", "keys", "prompt", "root")

    def __init__(self, root: bytes, block_size: int, prompt: bytes, keys: Sequence[ContentKey]) -> None:
        self.root = root
        self.block_size = block_size
        self.prompt = prompt
        self.keys = tuple(key for key in keys if key.stop is not None)  # the others are in the root
        self.digests: list[bytes] = []

    @property
    def block_bytes(self) -> int:
        return BYTES_PER_TOKEN * self.block_size

    def extend(self, tokens: bytes, start: int, count: int) -> None:
        """Hashes the next `count` blocks, whose bytes begin at block `start` of `tokens`."""
        digests, size = self.digests, self.block_bytes
        digest = digests[-1] if digests else self.root
        if not self.keys:
            digests += hash_blocks(digest, tokens, start * size, count, size)
            return
        for place in range(start * size, (start + count) * size, size):
            block = digest + tokens[place : place + size] + self.keys_within(len(digests))
            digest = sha256(block).digest()
            digests.append(digest)

    def extend_from_prompt(self, count: int) -> None:
        """Hashes up to `count` blocks of the prompt beyond those that have their digest."""
        known = len(self.digests)
        full = len(self.prompt) // self.block_bytes
        self.extend(self.prompt, known, min(count, full - known))

    def name(self, tokens: bytes, start: int, count: int) -> None:
        """Makes sure that there are the digests of `count` blocks from `start` on, which hold `tokens`."""
        digests, size = self.digests, self.block_bytes
        ahead = min(len(digests) - start, count)
        if ahead > 0 and self.prompt[start * size : (start + ahead) * size] != tokens[: ahead * size]:
            del digests[start:]  # other tokens were appended than admission was told
            ahead = 0
        if ahead < count:
            self.extend(tokens, ahead, count - ahead)
            self.prompt = b""  # all that it could still tell is in the blocks now

    def parent(self, index: int) -> bytes:
        return self.digests[index - 1] if index else self.root

    def keys_within(self, index: int) -> bytes:
        """The keys that touch block `index`, with where they start relative to it."""
        first, last = index * self.block_size, (index + 1) * self.block_size
        return b"".join(
            sorted({key.encode(first) for key in self.keys if key.start < last and first < key.stop})
        )

    def copy(self) -> TokenChain:
        twin = TokenChain(self.root, self.block_size, self.prompt, self.keys)
        twin.digests = self.digests.copy()
        return twin


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value
