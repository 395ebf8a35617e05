"""What callers give, lists, arrays, tensors or mere counts, is made into arrays once, at the door."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from .._arguments import check_integer, lists_integers
from .arguments import is_listing

Tokens = Sequence[int] | np.ndarray | int
"""Token ids of one sequence (list, array, CPU tensor), or only their number where ids are not known.

Any 32-bit integers are ids, negative ones too: the manager only compares them, and knows of no vocabulary.
"""


def parse_prompt(tokens: Tokens) -> tuple[int, bytes]:
    """How many tokens, and their ids as little-endian int32: nothing where only a number is given."""
    if _is_number(tokens):
        return check_integer("tokens", tokens, 0), b""
    ids = _ids(tokens)
    return len(ids), ids.tobytes()


class Batch(NamedTuple):
    """New tokens of S sequences, T in all.

    counts: [S] tokens of each, or None where each has one. ids: [T] int32, None where no sequence has
        ids.
    unknown: [S] bool, sequences without ids; None where all have them.
    """

    counts: list[int] | None
    ids: np.ndarray | None
    unknown: np.ndarray | None


def parse_batch(tokens: np.ndarray | Sequence[Tokens], num_seqs: int) -> Batch:
    num_dims = getattr(tokens, "ndim", None)
    if not num_dims and not is_listing(tokens):
        raise TypeError(f"tokens: expected one entry for each of the {num_seqs} sequences, got {tokens!r}")
    if len(tokens) != num_seqs:
        raise ValueError(
            f"tokens: expected one entry for each of the {num_seqs} sequences, got {len(tokens)}"
        )
    if num_dims == 2:
        count = tokens.shape[1]
        counts = None if count == 1 else [count] * num_seqs
        return Batch(counts, _ids(np.asarray(tokens).reshape(-1)), None)
    missing = [_is_number(entry) for entry in tokens]
    parts = [check_integer("tokens", t, 0) if m else _ids(t) for t, m in zip(tokens, missing, strict=True)]
    listed = [part if m else len(part) for part, m in zip(parts, missing, strict=True)]
    counts = None if all(count == 1 for count in listed) else listed
    unknown = np.array(missing, np.bool_) if any(missing) else None
    if all(missing):
        return Batch(counts, None, unknown)
    parts = [np.zeros(part, np.int32) if m else part for part, m in zip(parts, missing, strict=True)]
    return Batch(counts, parts[0] if len(parts) == 1 else np.concatenate(parts), unknown)


def parse_lengths(name: str, lengths: Sequence[int] | np.ndarray, num_seqs: int) -> np.ndarray:
    bools = isinstance(lengths, (list, tuple)) and bool in map(
        type, lengths
    )  # integers to numpy, among integers
    with suppress(ValueError):  # entries of several lengths
        array = np.asarray(lengths)
        if array.shape == (num_seqs,) and (not num_seqs or array.dtype.kind in "iu") and not bools:
            return array.astype(np.int64)
    error = ValueError if lists_integers(lengths) else TypeError
    raise error(f"{name}: expected one integer for each of the {num_seqs} sequences, got {lengths!r}")


def _is_number(tokens: object) -> bool:
    return isinstance(tokens, (int, np.integer))


def _ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """[T] int32 in this machine's byte order."""
    try:
        array = np.asarray(tokens)
    except ValueError:  # rows of several lengths
        raise ValueError(f"tokens: expected one row of ids for a sequence, got {tokens!r}") from None
    if not array.ndim:
        raise TypeError(f"tokens: expected the token ids of a sequence or their number, got {tokens!r}")
    if array.ndim > 1:
        raise ValueError(f"tokens: expected one row of ids for a sequence, got shape {array.shape}")
    if array.dtype.char == "i" and array.dtype.isnative:
        return array
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind in "iu":
        ids = array.astype(np.int32)
        if (ids == array).all():
            return ids
    elif not lists_integers(tokens):
        raise TypeError(f"tokens: expected ids that are integers, got {array.dtype}")
    else:  # some beyond 64 bits
        array = np.array(tokens, np.object_)
    raise ValueError(f"tokens: expected ids that fit into 32 bits, got {array.min()} to {array.max()}")
