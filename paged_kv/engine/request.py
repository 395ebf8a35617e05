"""A request on its way through the engine."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from .sampling_params import SamplingParams

__all__ = ["FinishReason", "Request"]


class FinishReason(str, Enum):
    STOP = "stop"  # it produced a stop token
    LENGTH = "length"  # max_tokens, or as many tokens as a sequence may have here
    REFUSED = "refused"  # it could never run; `error` says why
    ABORTED = "aborted"


@dataclass(eq=False)
class Request:
    """Tokens `[0, num_computed)` have their keys and values in the cache; those behind them wait.

    A request waits, runs, may be preempted (its blocks go, its tokens stay) and finishes.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_token_ids: Collection[int]  # those of the model included, unless they are ignored
    max_len: int  # prompt and new tokens together
    token_ids: list[int] = field(init=False)  # prompt and new tokens
    num_computed: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def new_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add_token(self, token: int) -> None:
        self.token_ids.append(token)
        if token in self.stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= self.max_len:
            self.finish_reason = FinishReason.LENGTH
