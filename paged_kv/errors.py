"""Every exception of paged_kv, as a tree: lack of room on one branch, wrong use on the other.

PagedKVError
├── OutOfRoomError              there was no room; nothing has changed, so the call may be tried again later
│   ├── OutOfBlocksError        needed, free
│   ├── OutOfHostBlocksError    needed, free
│   └── PinBudgetError          needed, left
└── UsageError                  the call can't be right, however often it is repeated
    ├── UnknownSequenceError    seq_id: never admitted, or freed already
    ├── DuplicateSequenceError  seq_id: admitted already, or named twice in one call
    ├── SwappedSequenceError    seq_id: on the host; swap it in first
    ├── ResidentSequenceError   seq_id: on the device already
    ├── RollbackError           seq_id, seq_len, lowest, highest: a length that can't be reached
    ├── TransferMismatchError   name, expected, found: a file that was made for another cache
    ├── SharedBlockError        seq_id, block: a write here needs a copy that this call can't report
    └── UnsupportedModelError   a model means something that the ops can't do; the sentence says what

Exceptions carry their numbers as attributes. A call of the manager that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Hashable


class PagedKVError(Exception):
    """Base of all exceptions raised by paged_kv itself; bad argument values raise ValueError or TypeError."""


class OutOfRoomError(PagedKVError):
    """There is no room now. Free, preempt or swap something, then try again."""


class OutOfBlocksError(OutOfRoomError):
    """`needed` blocks were asked for, `free` could be handed out (evictable ones included)."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free (evictable ones included)")
        self.needed = needed
        self.free = free


class OutOfHostBlocksError(OutOfRoomError):
    """A swap needs `needed` host blocks, `free` are free."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} host blocks needed, {free} free")
        self.needed = needed
        self.free = free


class PinBudgetError(OutOfRoomError):
    """A pin needs `needed` blocks of the budget, `left` are left."""

    def __init__(self, needed: int, left: int) -> None:
        super().__init__(f"{needed} blocks to pin, {left} left in the budget")
        self.needed = needed
        self.left = left


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


class SwappedSequenceError(UsageError):
    """The sequence is on the host; only swap_in and free take it."""

    def __init__(self, seq_id: Hashable) -> None:
        super().__init__(f"sequence {seq_id!r} is swapped out; swap it in first")
        self.seq_id = seq_id


class ResidentSequenceError(UsageError):
    """The sequence is on the device, so it can't be swapped in."""

    def __init__(self, seq_id: Hashable) -> None:
        super().__init__(f"sequence {seq_id!r} is on the device already")
        self.seq_id = seq_id


class RollbackError(UsageError, ValueError):
    """A rollback asked for `seq_len` tokens, but only `lowest` to `highest` can be reached."""

    def __init__(self, seq_id: Hashable, seq_len: int, lowest: int, highest: int) -> None:
        super().__init__(
            f"sequence {seq_id!r} can be rolled back to {lowest} to {highest} tokens, not to {seq_len}"
        )
        self.seq_id = seq_id
        self.seq_len = seq_len
        self.lowest = lowest
        self.highest = highest


class TransferMismatchError(UsageError, ValueError):
    """A file was exported from a cache that differs in `name`."""

    def __init__(self, name: str, expected: object, found: object) -> None:
        super().__init__(f"{name}: expected {expected}, the file has {found}")
        self.name = name
        self.expected = expected
        self.found = found


class SharedBlockError(UsageError):
    """The next token would go to a block that others read; `append` makes and reports the copy it needs."""

    def __init__(self, seq_id: Hashable, block: int) -> None:
        super().__init__(
            f"sequence {seq_id!r}: its next token lies in block {block}, which others hold or the prefix cache finds;"
            " use append, which reports the block copy"
        )
        self.seq_id = seq_id
        self.block = block


class UnsupportedModelError(UsageError):
    """A model cannot run on a paged cache: refused before it computes something else than it means."""
