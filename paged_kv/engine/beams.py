"""Beam search, token for token and score for score as transformers' `generate(num_beams=...)` does it.

A step takes the best continuations of all beams together. Those that end become hypotheses, if they are among the
best `width`; of the others the best `width` are the next beams, each going on from the blocks of its parent.

    score of a hypothesis = sum of its log-probabilities / its new tokens ** length_penalty
"""

from __future__ import annotations

import torch
from torch import Tensor

from .request import FinishReason, Request, Sequence

__all__ = ["BeamSearch"]


class BeamSearch:
    """The search that answers `request`."""

    def __init__(self, request: Request) -> None:
        self.params = request.params
        self.num_prompt = len(request.prompt_ids)
        self.max_len = request.max_len
        self.stop_token_ids = request.stop_token_ids
        self.width = self.params.beam_width
        self.num_candidates = max(2, 1 + len(self.stop_token_ids)) * self.width
        self.hypotheses: list[Sequence] = []  # the best `width` so far, the best first
        self.finished: list[Sequence] = []  # the answer, once the search has ended
        self.improvable = True

    @property
    def _full(self) -> bool:
        return len(self.hypotheses) == self.width

    def advance(self, beams: list[Sequence], log_probs: Tensor) -> list[tuple[int, int, float]] | None:
        """Takes one step from the beams, or from the stem alone at first.

        Args:
            beams: S sequences of equal length.
            log_probs: `[S, vocab_size]` float32 of their next token, after processors.

        Returns:
            for each next beam its parent's place in `beams`, its token and its score; None if the search has
            ended, with the answer in `finished`.
        """
        length = len(beams[0].token_ids) + 1 - self.num_prompt  # new tokens with the next one
        vocab_size = log_probs.shape[1]
        scores = torch.tensor([beam.score for beam in beams], dtype=torch.float32, device=log_probs.device)
        total = (log_probs + scores[:, None]).flatten()
        values, places = total.topk(min(self.num_candidates, len(total)))

        at_end = length + self.num_prompt >= self.max_len
        going_on, ending, stopped = [], [], []
        for rank, (value, place) in enumerate(zip(values, places.tolist(), strict=True)):
            parent, token = divmod(place, vocab_size)
            stops = token in self.stop_token_ids
            if not stops and not at_end:
                going_on.append((parent, token, float(value)))
            elif rank < self.width:
                ending.append((beams[parent], token, value / length**self.params.length_penalty, stops))
            if stops:  # goes on, too, where fewer others than beams are left, far behind
                stopped.append((parent, token, float(value) - 1e9))
        stop_early = self.params.early_stopping is True
        if self.improvable and not (stop_early and self._full):
            for parent, token, value, stops in ending:
                self._add(parent, token, float(value), stops)
        next_beams = [*going_on, *stopped][: self.width]
        if next_beams:
            self._check_improvable(torch.tensor(next_beams[0][2]), length)
        if at_end or (stop_early and self._full) or not self.improvable:
            self.finished = self.hypotheses[: self.params.n]
            return None
        return next_beams

    def _check_improvable(self, best: Tensor, length: int) -> None:
        """Whether a beam could still come to be better than the worst hypothesis."""
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.max_len - self.num_prompt
        worst = self.hypotheses[-1].score if self._full else -1e9
        self.improvable = self.improvable and bool(best / length**penalty > worst)

    def _add(self, parent: Sequence, token: int, score: float, stops: bool) -> None:
        tokens = [*parent.token_ids, token]
        hypothesis = Sequence(parent.seq_id, tokens, self.num_prompt, parent.seed, score=score)
        hypothesis.finish_reason = FinishReason.STOP if stops else FinishReason.LENGTH
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda other: -other.score)
        del self.hypotheses[self.width :]
