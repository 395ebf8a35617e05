"""Every exception of paged_kv, as a tree: lack of room on one branch, wrong use on the other.

PagedKVError
├── OutOfRoomError              there was no room; nothing has changed, so the call may be tried again later
│   └── OutOfBlocksError        needed, free
└── UsageError                  the call can't be right, however often it is repeated
    ├── UnknownSequenceError    seq_id: never admitted, or freed already
    ├── DuplicateSequenceError  seq_id: admitted already, or named twice in one call
    ├── SharedBlockError        seq_id, block: a write here needs a copy that this call can't report
    └── UnsupportedModelError   a model means something that the ops can't do; the sentence says what

Exceptions carry their numbers as attributes. A call of the manager that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Hashable


class PagedKVError(Exception):
    """Base of all exceptions raised by paged_kv itself; bad argument values raise ValueError or
    TypeError."""


class OutOfRoomError(PagedKVError):
    """There is no room now. Free, preempt or swap something, then try again."""


class OutOfBlocksError(OutOfRoomError):
    """The pool has too few blocks: `needed` were asked for, `free` could be handed out (evictable ones
    included)."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free (evictable ones included)")
        self.needed = needed
        self.free = free


class UsageError(PagedKVError):
    """The call is wrong in itself."""


class UnknownSequenceError(UsageError, KeyError):
    """No sequence of that id is held: it was never admitted, or it was freed already."""

    def __init__(self, seq_id: Hashable) -> None:
        super().__init__(f"no sequence {seq_id!r}: it was never admitted, or it was freed already")
        self.seq_id = seq_id

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return self.args[0]


class DuplicateSequenceError(UsageError):
    """That sequence exists already, or one call names it twice."""

    def __init__(self, seq_id: Hashable, why: str) -> None:
        super().__init__(f"sequence {seq_id!r} {why}")
        self.seq_id = seq_id


class SharedBlockError(UsageError):
    """A token would be written to a block that others read; `append` makes and reports the copy that this
    needs."""

    def __init__(self, seq_id: Hashable, block: int) -> None:
        super().__init__(
            f"sequence {seq_id!r}: its next token lies in block {block}, which others hold too;"
            " use append, which reports the block copy"
        )
        self.seq_id = seq_id
        self.block = block


class UnsupportedModelError(UsageError):
    """A model cannot run on a paged cache: refused before it computes something else than it means."""
