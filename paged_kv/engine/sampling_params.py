"""What a request asks of the sampler, and when it is to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass

from torch import Tensor

from .._arguments import check_flag, check_integer, check_real, is_row

__all__ = ["SamplingParams"]

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""(token ids [1, L], scores [1, vocab_size]) -> scores: what transformers calls so."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request. The default is greedy.

    Args:
        max_tokens: number of new tokens after which a sequence ends, at least 1.
        min_tokens: number of new tokens before which nothing but `max_tokens` ends it.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: only the k likeliest tokens are sampled from; None for all.
        top_p: of these, only the fewest likeliest tokens whose probabilities reach top_p, in (0, 1].
        seed: the same seed gives the same random numbers whatever else is in the batch, in [0, 2**64); None
            draws a fresh one.
        n: sequences to answer with. They share the prompt, and each has its own stream of random numbers.
        best_of: sequences to compute, of which the n with the highest mean log-probability are the answer.
        beam_width: beams of a beam search, of which the n best are the answer; temperature must be 0.
        length_penalty, early_stopping: of a beam search, as in transformers: scores are divided by
            length ** length_penalty, -16 to 16; early_stopping is True, False or "never".
        repetition_penalty: above 1 for less likely repetitions of any token so far, as in transformers.
        presence_penalty: taken off the logits of the tokens that the answer has already.
        logits_processors: of transformers or alike; called with the tokens so far and the scores.
        logprobs: tells for each new token its log-probability, and those of so many likeliest tokens, by the
            model alone: before penalties, temperature, top_k and top_p.
        stop: texts that end a sequence; they are not part of its text. Needs a tokenizer.
        stop_token_ids: tokens that end a sequence, besides the model's own end-of-sequence tokens. The
            token that ends a sequence is part of its token_ids.
        ignore_eos: go on after the model's own end-of-sequence tokens.
        draft_tokens: most tokens to guess in a step from what followed the same tokens before; one call of the
            model tells which are right, so that repetitive text takes fewer steps. No token changes.

    Raises:
        ValueError, TypeError: a parameter is out of range or of another type; the message names it.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    logits_processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 1)
        check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_real(
            "temperature", self.temperature, "a finite number of at least 0", lambda t: 0 <= t < math.inf
        )
        check_real("top_p", self.top_p, "a number in (0, 1]", lambda p: 0 < p <= 1)
        check_integer("n", self.n, 1)
        for name, low, high in (
            ("top_k", 1, None),
            ("seed", 0, 2**64 - 1),
            ("best_of", 1, None),
            ("beam_width", 2, None),
            ("logprobs", 0, None),
        ):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low, high)
        for name in ("best_of", "beam_width"):
            value = getattr(self, name)
            if value is not None and value < self.n:
                raise ValueError(
                    f"{name}: expected an integer of at least {self.n}, since n is {self.n}, got {value}"
                )
        # More, and length ** length_penalty would be beyond float64 for some length.
        check_real("length_penalty", self.length_penalty, "a number from -16 to 16", lambda p: -16 <= p <= 16)
        is_text = isinstance(self.early_stopping, str)
        if not (self.early_stopping == "never" if is_text else isinstance(self.early_stopping, bool)):
            error = ValueError if is_text else TypeError
            raise error(f"early_stopping: expected True, False or 'never', got {self.early_stopping!r}")
        check_real(
            "repetition_penalty",
            self.repetition_penalty,
            "a finite number above 0",
            lambda p: 0 < p < math.inf,
        )
        check_real("presence_penalty", self.presence_penalty, "a finite number", math.isfinite)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, what in (
            ("stop", "texts"),
            ("stop_token_ids", "token ids"),
            ("logits_processors", "functions"),
        ):
            value = getattr(self, name)
            if not is_row(value) and not isinstance(value, Set):
                raise TypeError(f"{name}: expected {what}, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        for text in self.stop:
            if not isinstance(text, str):
                raise TypeError(f"stop: expected texts, got {text!r}")
            if not text:
                raise ValueError("stop: expected texts of one character or more, got ''")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0)
        for processor in self.logits_processors:
            if not callable(processor):
                raise TypeError(f"logits_processors: expected functions, got {processor!r}")
        check_flag("ignore_eos", self.ignore_eos)
        check_integer("draft_tokens", self.draft_tokens, 0)
        if self.beam_width is not None:
            self._check_beams()

    def _check_beams(self) -> None:
        for name, allowed in (
            ("temperature", 0),
            ("best_of", None),
            ("logprobs", None),
            ("stop", ()),
            ("draft_tokens", 0),
        ):
            if getattr(self, name) != allowed:
                raise ValueError(
                    f"{name}: expected {0 if allowed == 0 else 'none'} with beam_width, got {getattr(self, name)!r}"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_seqs(self) -> int:
        """Sequences that are computed at once."""
        return self.beam_width or self.best_of or self.n
