"""What callers give is checked at the door: integers are Python's or numpy's, never bools or floats.

A wrong kind raises TypeError, a value out of range ValueError; the sentence names the argument, what was expected and
what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from operator import index

import numpy as np

MAX_GROUPS = 256  # a block's group is noted in one byte
MAX_WINDOW = np.iinfo(np.int64).max  # what lengths are counted in; larger ones hide nothing either


def integer(name: str, value: object, least: int, most: int | None = None) -> int:
    bound = f"of at least {least}" if most is None else f"from {least} to {most}"
    error: type[Exception] = TypeError
    if not isinstance(value, (bool, np.bool_)):
        try:
            number = index(value)
            if least <= number and (most is None or number <= most):
                return number
            error = ValueError
        except TypeError:
            pass
    raise error(f"{name} must be an integer {bound}, not {value!r}")


def seconds(name: str, value: object) -> float:
    """A time span, infinity too."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of at least 0, not {value!r}")
    if not value >= 0:  # NaN neither
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return float(value)


def instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, not {value!r}")


def hashable(seq_id: object) -> None:
    try:
        hash(seq_id)
    except TypeError:
        raise TypeError(f"seq_id must be hashable, not {seq_id!r}") from None


def window_sizes(windows: object) -> tuple[int | None, ...]:
    expected = "windows must hold None or an integer of at least 1 for each group of layers"
    if not is_listing(windows):
        raise TypeError(f"{expected}, not {windows!r}")
    if not len(windows):
        raise ValueError(f"{expected}, not {windows!r}")
    if len(windows) > MAX_GROUPS:
        raise ValueError(f"windows must have at most {MAX_GROUPS} entries, not {len(windows)}")
    return tuple(
        None if window is None else min(integer("an entry of windows", window, 1), MAX_WINDOW)
        for window in windows
    )


def is_listing(value: object) -> bool:
    """Whether it is a row of things: text is one thing, and a set has no order."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
