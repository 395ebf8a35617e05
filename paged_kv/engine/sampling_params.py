"""What a request asks of the sampler, and when it is to end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

__all__ = ["SamplingParams"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request. The default is greedy.

    Args:
        max_tokens: number of new tokens after which the request ends, at least 1.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: only the k likeliest tokens are sampled from; None for all.
        top_p: of these, only the fewest likeliest tokens whose probabilities reach top_p, in (0, 1].
        seed: the same seed gives the same random numbers whatever else is in the batch, in [0, 2**64); None
            draws a fresh one.
        stop_token_ids: tokens that end the request, besides the model's own end-of-sequence tokens. The
            token that ends a request is part of its token_ids.
        ignore_eos: go on after the model's own end-of-sequence tokens.

    Raises:
        ValueError, TypeError: a parameter is out of range or of another type; the message names it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_real("temperature", self.temperature, "0 or more", lambda t: 0 <= t < math.inf)
        if self.top_k is not None:
            _check_integer("top_k", self.top_k, 1)
        _check_real("top_p", self.top_p, "a number in (0, 1]", lambda p: 0 < p <= 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        try:
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        except TypeError:
            raise TypeError(f"stop_token_ids: expected token ids, got {self.stop_token_ids!r}") from None
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos: expected True or False, got {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    expected = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _check_real(name: str, value: object, expected: str, holds) -> None:  # noqa: ANN001
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    if not holds(value):  # NaN does not either
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
