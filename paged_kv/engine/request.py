"""A request on its way through the engine, and the sequences that answer it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING

from .sampling_params import LogitsProcessor, SamplingParams

if TYPE_CHECKING:
    from .beams import BeamSearch
    from .detokenizer import TextStream
    from .drafts import PromptLookup

__all__ = ["FinishReason", "Request", "Sequence"]


class FinishReason(str, Enum):
    STOP = "stop"  # it produced a stop token or a stop text
    LENGTH = "length"  # max_tokens, or as many tokens as a sequence may have here
    REFUSED = "refused"  # it could never run; `error` says why
    ABORTED = "aborted"
    ERROR = "error"  # something of its own went wrong; `error` says what


@dataclass(eq=False)
class Sequence:
    """One text. Tokens `[0, num_computed)` have their keys and values in the cache; those behind them wait."""

    seq_id: tuple[int, int]  # the request's number and the sequence's within it
    token_ids: list[int]  # prompt and new tokens
    num_prompt: int
    seed: int
    num_computed: int = 0
    drafts: list[int] = field(default_factory=list)  # guesses that the step being computed verifies
    lookup: PromptLookup | None = None  # where guesses come from
    text_stream: TextStream | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)  # of each new token, if asked for
    # Sum of log-probabilities, where they are asked for; of a beam, as transformers scores it.
    score: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    last_token_at: float | None = None

    @property
    def new_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def text(self) -> str:
        """Of the new tokens; empty without a tokenizer. What may turn out to be a stop text is not yet in it."""
        return self.text_stream.text if self.text_stream else ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.finish_reason, self.error = reason, error
        if self.text_stream:
            self.text_stream.close()


@dataclass(eq=False)
class Request:
    """A prompt and what answers it: one sequence, several samples, or beams.

    Only the first unfinished sequence, the stem, is computed up to the prompt's end; there the others fork from
    it. So it is again after a preemption that took the blocks.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_token_ids: Collection[int]  # those of the model included, unless they are ignored
    max_len: int  # prompt and new tokens of a sequence together
    priority: int = 0
    salt: str | None = None
    on_token: Callable[[Request], None] | None = None
    processors: list[LogitsProcessor] = field(default_factory=list)
    beams: BeamSearch | None = None
    forked: bool = False  # all unfinished sequences are in the cache, not only the stem
    swapped: bool = False  # they are on the host
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_preemptions: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None

    def __post_init__(self) -> None:
        seed = secrets.randbits(64) if self.params.seed is None else self.params.seed
        self.sequences = [
            Sequence((self.request_id, i), list(self.prompt_ids), len(self.prompt_ids), seed_of(seed, i))
            for i in range(self.params.num_seqs)
        ]
        self.live = list(self.sequences)  # those that have not finished

    @property
    def order(self) -> tuple[int, int]:
        """Smaller ones are served first and preempted last."""
        return -self.priority, self.request_id

    @property
    def resident(self) -> list[Sequence]:
        """The sequences that hold blocks while the request runs."""
        return self.live if self.forked else self.live[:1]

    def wants(self) -> list[tuple[Sequence, int]]:
        """How many tokens of each resident sequence can be computed now."""
        if not self.forked and len(self.live) > 1:
            return [(self.live[0], len(self.prompt_ids) - self.live[0].num_computed)]
        pending = [(sequence, len(sequence.token_ids) - sequence.num_computed) for sequence in self.resident]
        if self.beams and any(count > 1 for _, count in pending):
            # Beams are compared with each other, so that their last tokens are computed together.
            return [(sequence, count - 1) for sequence, count in pending if count > 1]
        return pending

    @property
    def completions(self) -> list[Sequence]:
        """The n sequences that are the answer, the best first where they were compared."""
        if self.beams and self.beams.finished:
            return self.beams.finished
        if self.params.best_of is not None and self.finished:
            return sorted(self.sequences, key=self.score, reverse=True)[: self.params.n]
        return self.sequences[: self.params.n]

    def score(self, sequence: Sequence) -> float | None:
        """What decides whether `sequence` is among the answers; None where nothing does."""
        if self.beams:
            return sequence.score
        return None if self.params.best_of is None else sequence.score / max(1, sequence.num_new_tokens)

    @property
    def compares(self) -> bool:
        """Whether the answer is known at the end only."""
        return self.params.num_seqs > self.params.n or self.beams is not None

    # Of the first completion

    @property
    def new_token_ids(self) -> list[int]:
        return self.completions[0].new_token_ids

    @property
    def num_new_tokens(self) -> int:
        return self.completions[0].num_new_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason if self.finished else None

    @property
    def error(self) -> str | None:
        return next((sequence.error for sequence in self.sequences if sequence.error), None)

    @property
    def finished(self) -> bool:
        return not self.live

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends all that has not ended."""
        for sequence in self.live:
            sequence.finish(reason, error)
        self.live = []


def seed_of(seed: int, index: int) -> int:
    """The seed of a request's sequence `index`: the first one has the request's own."""
    if not index:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
