"""What callers of the cache, the engine and transfer give is checked by name.

A wrong kind raises TypeError, a value out of range ValueError; the sentence names the argument, what was expected and
what came. Those of the manager are checked in manager/arguments.py.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real

__all__ = ["check_flag", "check_instance", "check_integer", "check_real"]


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value`, an integer of Python's or numpy's in that range, as Python's."""
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return int(value)


def check_real(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    try:
        holds_of_float = holds(float(value))  # NaN does not either
    except OverflowError:
        holds_of_float = False
    if not holds_of_float:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_instance(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
