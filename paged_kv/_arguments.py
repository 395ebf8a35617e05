"""What callers give is checked by name, once, at the door.

A wrong kind raises TypeError, a value out of range ValueError; the sentence names the argument, what was expected and
what came. Integers are Python's or numpy's, never bools or floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from operator import index

import numpy as np

__all__ = [
    "check_choice",
    "check_flag",
    "check_instance",
    "check_integer",
    "check_real",
    "check_token_ids",
    "is_row",
    "lists_integers",
]


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value`, an integer of Python's or numpy's in that range, as Python's."""
    known = _is_integer(value)
    if known and low <= value and (high is None or value <= high):
        return int(value)
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    raise (ValueError if known else TypeError)(f"{name}: expected {expected}, got {value!r}")


def check_real(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> float:
    """`value`, a real number that holds, as Python's."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    try:
        number = float(value)
        holds_of_float = holds(number)  # NaN does not either
    except OverflowError:
        holds_of_float = False
    if not holds_of_float:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return number


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_choice(name: str, value: object, choices: tuple) -> None:
    """`value` is one of `choices`, and of the type of one where it is none."""
    if not isinstance(value, tuple(map(type, choices))):
        raise TypeError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def check_instance(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")


def check_token_ids(name: str, tokens: object) -> list[int]:
    """`tokens`, a row of what stands for integers, as Python's."""
    expected = f"{name}: expected token ids, which are integers"
    if not is_row(tokens):
        raise TypeError(f"{expected}, got {tokens!r}")
    ids = []
    for token in tokens:
        try:
            ids.append(index(token))
        except TypeError:
            raise TypeError(f"{expected}, got {token!r}") from None
        if isinstance(token, bool):
            raise TypeError(f"{expected}, got {token!r}")
    return ids


def is_row(value: object) -> bool:
    """Whether it is things in an order: text and bytes are one thing, and of a dict Python goes through the keys."""
    one = (str, bytes, bytearray, memoryview)
    several = isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
    return several and not isinstance(value, (*one, Mapping, Set))


def lists_integers(value: object) -> bool:
    """Whether it is a sequence or an array of integers, or of rows of them, however large: numpy makes floats or
    objects of some, and integers of bools among integers."""
    if isinstance(value, np.ndarray) and value.dtype != np.object_:
        return value.ndim > 0 and (not value.size or value.dtype.kind in "iu")
    if not isinstance(value, (np.ndarray, Sequence)) or not is_row(value):
        return False
    return all(_is_integer(entry) or lists_integers(entry) for entry in value)


def _is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
