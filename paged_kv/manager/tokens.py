"""Tokens as callers give them, lists, arrays, tensors or mere counts, made into arrays once at the door."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Tokens = Sequence[int] | np.ndarray | int
"""Token ids of one sequence (list, array, CPU tensor), or only their number where ids are not known."""


def num_tokens_of(tokens: Tokens) -> int:
    if isinstance(tokens, (int, np.integer)):
        if tokens < 0:
            raise ValueError(f"a number of tokens must be at least 0, not {tokens}")
        return int(tokens)
    return len(tokens)


def token_bytes(tokens: Tokens) -> bytes:
    """The ids as little-endian int32, whatever holds them; nothing where only a number is given."""
    return b"" if isinstance(tokens, (int, np.integer)) else _ids(tokens).tobytes()


def parse_batch(
    tokens: np.ndarray | Sequence[Tokens], num_seqs: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Counts [num_seqs] int64, ids of all tokens [sum(counts)] int32, and which sequences have no ids
    [num_seqs] bool.

    ids is None where no sequence has any, the mask where all have them.
    """
    if len(tokens) != num_seqs:
        raise ValueError(
            f"tokens must have one entry for each of the {num_seqs} sequences, not {len(tokens)}"
        )
    if getattr(tokens, "ndim", 0) == 2:
        return np.full(num_seqs, tokens.shape[1], np.int64), _ids(tokens).reshape(-1), None
    counts = np.array([num_tokens_of(entry) for entry in tokens], np.int64)
    unknown = np.array([isinstance(entry, (int, np.integer)) for entry in tokens], np.bool_)
    if unknown.all():
        return counts, None, unknown
    parts = [
        np.zeros(entry, np.int32) if isinstance(entry, (int, np.integer)) else _ids(entry) for entry in tokens
    ]
    return counts, np.concatenate(parts), unknown if unknown.any() else None


def _ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(tokens)
    if array.dtype == np.int32:
        return array
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, not {array.dtype}")
    ids = array.astype(np.int32)
    if (ids != array).any():
        raise ValueError(f"token ids must fit into 32 bits, not {array.min()} to {array.max()}")
    return ids
