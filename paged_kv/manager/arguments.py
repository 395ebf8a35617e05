"""What is asked of the manager's arguments beyond `paged_kv._arguments`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._arguments import check_integer

MAX_COUNT = np.iinfo(np.int32).max  # of blocks and of slots in one: what tables hold ids in
MAX_GROUPS = 256  # a block's group is noted in one byte
MAX_WINDOW = np.iinfo(np.int64).max  # what lengths are counted in; larger ones hide nothing either


def instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")


def hashable(name: str, seq_id: object) -> None:
    try:
        hash(seq_id)
    except TypeError:
        raise TypeError(f"{name}: expected a hashable id, got {seq_id!r}") from None


def listing(name: str, value: object, expected: str) -> None:
    if not is_listing(value):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")


def window_sizes(windows: object) -> tuple[int | None, ...]:
    expected = "None or an integer of at least 1 for each group of layers"
    listing("windows", windows, expected)
    if not len(windows):
        raise ValueError(f"windows: expected {expected}, got {windows!r}")
    if len(windows) > MAX_GROUPS:
        raise ValueError(f"windows: expected at most {MAX_GROUPS} entries, got {len(windows)}")
    return tuple(
        None if window is None else min(check_integer(f"windows[{group}]", window, 1), MAX_WINDOW)
        for group, window in enumerate(windows)
    )


def is_listing(value: object) -> bool:
    """Whether it is a row of things: text is one thing, and a set has no order."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
