"""What happened, for metrics and for subscribers that keep a picture of their own.

From the events alone a subscriber can rebuild every block table and the prefix cache
(tests/manager_mirror.py does): an entry of a table changes only by `Held`, `Dropped`, `Copied`,
`Forked` and `SwappedOut`, the cache only by `Stored` and `Evicted`. A place is an index into a block table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """Places from `start` on of the table name `blocks` now: new ones, found ones, swapped in ones."""

    seq_id: Hashable
    group: int
    start: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Dropped:
    """Places `start` to `stop` (exclusive) name nothing now: freed, rolled back, behind a window, swapped."""

    seq_id: Hashable
    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Copied:
    """Copy-on-write: `place` names `destination` now instead of `source`."""

    seq_id: Hashable
    group: int
    place: int
    source: int
    destination: int


@dataclass(frozen=True)
class Forked:
    """The new `child_id` names the same blocks as `seq_id`, up to place `num_blocks` (exclusive)."""

    seq_id: Hashable
    child_id: Hashable
    num_blocks: int


@dataclass(frozen=True)
class Stored:
    """The prefix cache finds `block` under `digest`; `parent` is the digest of what precedes it."""

    group: int
    block: int
    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Evicted:
    """The prefix cache no longer finds `block` under `digest`: handed out again, overwritten or reset."""

    group: int
    block: int
    digest: bytes


@dataclass(frozen=True)
class SwappedOut:
    """`seq_ids` live on the host now; `pairs` of (device block, host block) are copied."""

    seq_ids: tuple[Hashable, ...]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SwappedIn:
    """`seq_ids` live on the device again; `pairs` of (host block, device block) are copied."""

    seq_ids: tuple[Hashable, ...]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Preempted:
    """`seq_id` gave up its blocks to be computed again later."""

    seq_id: Hashable


Event = Held | Dropped | Copied | Forked | Stored | Evicted | SwappedOut | SwappedIn | Preempted


@dataclass
class Counters:
    """Totals since the manager was made. Refused and raised calls add nothing."""

    admitted: int = 0  # sequences
    prompt_tokens: int = 0  # of admitted sequences, without those that come back after a preemption
    cached_tokens: int = 0  # of these, found in the prefix cache
    stored: int = 0  # blocks
    evicted: int = 0  # blocks
    copied: int = 0  # blocks
    forked: int = 0  # sequences
    swapped_out: int = 0  # blocks copied to the host
    swapped_in: int = 0  # blocks copied back
    preempted: int = 0  # sequences


@dataclass
class Recorder:
    """Counts what happens and tells those who want to hear it."""

    counters: Counters = field(default_factory=Counters)
    subscribers: list[Callable[[Event], None]] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        for subscriber in self.subscribers:
            try:
                subscriber(event)
            except Exception:  # raised further, it would leave a change half done
                logger.exception("a subscriber raised on %r", event)

    def held(self, seq_id: Hashable, group: int, start: int, blocks: list[int]) -> None:
        if self.subscribers and blocks:
            self.emit(Held(seq_id, group, start, tuple(blocks)))
