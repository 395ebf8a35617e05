"""A stand-in for a model under beam search: which beams survive a step."""

from __future__ import annotations

import numpy as np


class Beams:
    """Beam search over random scores: `width` beams a request.

    In every step each beam offers `width` continuations, whose costs (negative log probabilities) are drawn from the
    exponential distribution with mean 1, and of all of a request's continuations the `width` cheapest go on.
    """

    def __init__(self, width: int, seed: int = 0) -> None:
        self.width = width
        self._rng = np.random.default_rng(seed)
        self._costs: dict[int, np.ndarray] = {}  # by request, [width]

    def choose(self, requests: list[int]) -> list[int]:
        """For each beam of the requests in order, the index of the beam that it goes on from."""
        width = self.width
        start = np.where(np.arange(width) == 0, 0.0, np.inf)  # all beams are the same: one of them offers
        costs = np.array([self._costs.get(request, start) for request in requests])  # [R, width]
        offers = costs[:, :, None] + self._rng.exponential(size=(len(requests), width, width))
        offers = offers.reshape(len(requests), -1)
        best = np.argpartition(offers, width - 1, axis=1)[:, :width]  # [R, width]
        chosen = np.take_along_axis(offers, best, axis=1)
        for request, row in zip(requests, chosen - chosen.min(axis=1, keepdims=True), strict=True):
            self._costs[request] = row
        return (best // width + np.arange(len(requests))[:, None] * width).reshape(-1).tolist()

    def forget(self, request: int) -> None:
        self._costs.pop(request, None)
