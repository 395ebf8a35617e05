"""From logits to tokens. A token depends on its logits and on (seed, position) alone, never on the batch.

There is no random state: the number that decides token i of a sequence is a hash of its seed and i. So a
sequence that is preempted, or computed in other company, draws the same numbers again.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from hashlib import blake2b

import torch
from torch import Tensor

from .._optional import optional_import
from .request import Sequence
from .sampling_params import LogitsProcessor, SamplingParams

__all__ = ["ProcessorError", "new_processors", "process", "sample", "sample_one", "tell_logprobs", "uniform"]


class ProcessorError(Exception):
    """Ends the request whose processor raised, and no other."""


def sample(
    logits: Tensor, sequence: Sequence, params: SamplingParams, processors: list[LogitsProcessor]
) -> int:
    """The next token of a sequence, from `[vocab_size]` float32 logits."""
    if processors:
        logits = process(logits[None], [sequence], processors)[0]
    if params.greedy:
        return int(logits.argmax())
    return sample_one(logits, params, uniform(sequence.seed, sequence.num_new_tokens))


def process(scores: Tensor, sequences: list[Sequence], processors: list[LogitsProcessor]) -> Tensor:
    """`[S, vocab_size]` scores of the next token of sequences of equal length, after all processors."""
    ids = torch.tensor([sequence.token_ids for sequence in sequences], device=scores.device)
    shape = scores.shape
    scores = scores.clone()  # many processors write to what they get, which others read yet
    for processor in processors:
        try:
            scores = processor(ids, scores)
        except Exception as error:
            raise ProcessorError(f"a logits processor raised {error!r}") from error
        if not isinstance(scores, Tensor) or scores.shape != shape:
            got = list(scores.shape) if isinstance(scores, Tensor) else repr(scores)
            raise ProcessorError(f"a logits processor: expected scores {list(shape)}, got {got}")
    if not scores.amax().isfinite():  # NaN where there is any
        raise ProcessorError("logits processors: expected a finite score and none that is NaN or +inf")
    return scores


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


def tell_logprobs(logits: Tensor, token: int, count: int) -> dict[int, float]:
    """Log-probabilities of a token and of the `count` likeliest ones, these in order."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return {token: float(logprobs[token])} | dict(zip(ids.tolist(), values.tolist(), strict=True))


def new_processors(
    params: SamplingParams, num_prompt: int, stop_token_ids: Collection[int], device: torch.device
) -> list[LogitsProcessor]:
    """What changes the scores of a request's tokens before one is chosen."""
    processors: list[LogitsProcessor] = []
    if params.repetition_penalty != 1 or params.min_tokens:
        transformers = optional_import("transformers", "transformers")
    if params.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty:
        processors.append(PresencePenalty(params.presence_penalty, num_prompt))
    if params.min_tokens and stop_token_ids:
        processors.append(
            transformers.MinNewTokensLengthLogitsProcessor(
                num_prompt, params.min_tokens, sorted(stop_token_ids), device=str(device)
            )
        )
    return [*processors, *params.logits_processors]


class PresencePenalty:
    """Takes `penalty` off the scores of the tokens that the answer has already; transformers has none."""

    def __init__(self, penalty: float, num_prompt: int) -> None:
        self.penalty = penalty
        self.num_prompt = num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        present = torch.zeros_like(scores, dtype=torch.bool)
        present.scatter_(1, input_ids[:, self.num_prompt :], True)
        return torch.where(present, scores - self.penalty, scores)
