"""The exception tree. Each error carries the numbers that its sentence tells.

PagedKVError
    OutOfBlocksError    the pool cannot give what was asked for now; nothing was changed
"""

__all__ = ["OutOfBlocksError", "PagedKVError"]


class PagedKVError(Exception):
    """Root of the errors of running out and of misuse; a wrong argument raises ValueError or TypeError."""


class OutOfBlocksError(PagedKVError):
    """The pool has fewer free blocks than a call needs. The call changed nothing."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free")
        self.needed = needed
        self.free = free
