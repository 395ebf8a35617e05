"""Sampling parameters are checked by name; a token depends on its logits, seed and position alone."""

import math

import pytest
import torch

from paged_kv.engine import SamplingParams
from paged_kv.engine.sampler import sample, sample_one, uniform


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_tokens", 0, ValueError),
        ("max_tokens", 2.0, TypeError),
        ("max_tokens", True, TypeError),
        ("temperature", -0.1, ValueError),
        ("temperature", math.nan, ValueError),
        ("temperature", math.inf, ValueError),
        ("temperature", "hot", TypeError),
        ("top_k", 0, ValueError),
        ("top_k", 1.5, TypeError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_p", None, TypeError),
        ("seed", -1, ValueError),
        ("seed", 2**64, ValueError),
        ("seed", "7", TypeError),
        ("stop_token_ids", 3, TypeError),
        ("stop_token_ids", [-1], ValueError),
        ("stop_token_ids", ["a"], TypeError),
        ("ignore_eos", 1, TypeError),
    ],
)
def test_a_bad_parameter_raises_by_name(name, value, error):
    with pytest.raises(error, match=rf"^{name}: expected .*got"):
        SamplingParams(**{name: value})


def test_good_parameters_are_kept():
    params = SamplingParams(top_k=1, top_p=1, seed=2**64 - 1, stop_token_ids=[3, 4])
    assert params.stop_token_ids == (3, 4)
    assert params.greedy


def test_greedy_takes_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -torch.inf, 2.0]])
    assert sample(logits, [SamplingParams()] * 2, [0, 0], [0, 0]) == [1, 0]


def frequencies(logits, params, count=20_000):
    tokens = [sample_one(logits, params, uniform(seed, 0)) for seed in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=2.0, top_k=4, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=100),
    ],
    ids=repr,
)
def test_tokens_come_as_often_as_transformers_gives_them_probability(params):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.tensor([2.0, -1.0, 0.5, 1.9, 0.0, -torch.inf, 1.0])
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None])
    if params.top_k is not None:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    expected = scores[0].softmax(-1)
    found = frequencies(logits, params)
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / 20_000)  # four standard deviations


def test_extreme_temperatures_do_not_overflow():
    logits = torch.tensor([1e4, -1e4, 0.0])
    assert sample_one(logits, SamplingParams(temperature=1e-300), 0.999) == 0
    assert sample_one(logits, SamplingParams(temperature=1e300), 0.5) == 1


def test_the_largest_uniform_number_gives_a_token_that_may_be_drawn():
    logits = torch.full((50_000,), 0.1)
    logits[-1] = -torch.inf
    last = 1 - 2.0**-53
    assert sample_one(logits, SamplingParams(temperature=1.0), last) <= 49_998
    assert sample_one(logits, SamplingParams(temperature=1.0, top_p=0.5), last) < 50_000


def test_a_row_does_not_depend_on_its_batch():
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0 + i / 8, top_k=None if i % 2 else 50) for i in range(8)]
    seeds, positions = list(range(8)), list(range(8))
    together = sample(logits, params, seeds, positions)
    alone = [sample(logits[i : i + 1], [params[i]], [seeds[i]], [positions[i]])[0] for i in range(8)]
    assert together == alone


def test_uniform_numbers_are_fixed_for_ever_and_spread_evenly():
    assert uniform(0, 0) == 0.0564663990004608
    numbers = torch.tensor([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert (counts - 1000).abs().max() < 5 * math.sqrt(900)
