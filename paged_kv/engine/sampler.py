"""From logits to tokens. A token depends on its logits and on (seed, position) alone, never on the batch.

There is no random state: the number that decides token i of a request is a hash of its seed and i. So a
request that is preempted, or computed in other company, draws the same numbers again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from .sampling_params import SamplingParams

__all__ = ["sample", "sample_one", "uniform"]


def sample(
    logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """The next token of each of R requests.

    Args:
        logits: `[R, vocab_size]`, any float dtype.
        params: how each request samples.
        seeds: of each request, in [0, 2**64).
        positions: how many new tokens each request has already.
    """
    logits = logits.float()
    tokens = logits.argmax(-1).tolist()
    for row, (param, seed, position) in enumerate(zip(params, seeds, positions, strict=True)):
        if not param.greedy:
            tokens[row] = sample_one(logits[row], param, uniform(seed, position))
    return tokens


def sample_one(logits: Tensor, params: SamplingParams, u: float) -> int:
    """The token at which the cumulated probability passes `u`, a number in [0, 1).

    Temperature first, then top-k, then top-p, as transformers does.
    """
    scores = (logits.double() - logits.max()) / params.temperature  # at most 0, so that none overflows
    ids = None
    if params.top_k is not None:
        scores, ids = scores.topk(min(params.top_k, len(scores)))
    elif params.top_p < 1:
        scores, ids = scores.sort(descending=True, stable=True)
    probabilities = scores.softmax(-1)
    cumulated = probabilities.cumsum(-1)
    if params.top_p < 1:
        cumulated = cumulated[cumulated - probabilities < params.top_p]
    place = int(torch.searchsorted(cumulated, u * cumulated[-1], right=True))
    place = min(place, len(cumulated) - 1)  # u * total may round up to total
    return place if ids is None else int(ids[place])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same on every machine for the same seed and position."""
    digest = blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
