"""Sampling parameters are checked by name; a token depends on its logits, seed and position alone."""

import math
import re

import pytest
import torch

from paged_kv.engine import SamplingParams
from paged_kv.engine.request import Sequence, seed_of
from paged_kv.engine.sampler import new_processors, process, sample, sample_one, tell_logprobs, uniform


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
        ("min_tokens", 129, ValueError),
        ("min_tokens", -1, ValueError),
        ("n", 0, ValueError),
        ("n", 2.0, TypeError),
        ("best_of", 0, ValueError),
        ("beam_width", 1, ValueError),
        ("beam_width", "4", TypeError),
        ("length_penalty", math.nan, ValueError),
        ("length_penalty", 16.5, ValueError),  # to a power of it, a length is beyond float64 in the end
        ("temperature", 10**400, ValueError),  # no float either
        ("early_stopping", "sometimes", ValueError),
        ("repetition_penalty", 0.0, ValueError),
        ("repetition_penalty", None, TypeError),
        ("presence_penalty", math.inf, ValueError),
        ("logprobs", -1, ValueError),
        ("logprobs", True, TypeError),
        ("stop", "", ValueError),
        ("stop", [7], TypeError),
        ("stop", 7, TypeError),
        ("logits_processors", [7], TypeError),
        ("logits_processors", 7, TypeError),
        ("draft_tokens", -1, ValueError),
        ("draft_tokens", 1.5, TypeError),
        ("early_stopping", 1, TypeError),
        ("early_stopping", torch.zeros(2), TypeError),  # whose equality is no truth
    ],
)
def test_a_bad_parameter_raises_by_name(name, value, error):
    with pytest.raises(error, match=rf"^{name}: expected .*got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", "many", "an integer of at least 1"),
        ("min_tokens", None, "an integer from 0 to 128"),
        ("temperature", "hot", "a finite number of at least 0"),
        ("temperature", True, "a finite number of at least 0"),
        ("top_k", "all", "an integer of at least 1"),
        ("top_p", "0.9", "a number in (0, 1]"),
        ("length_penalty", [1.0], "a number from -16 to 16"),
        ("early_stopping", None, "True, False or 'never'"),
        ("repetition_penalty", "1.1", "a finite number above 0"),
        ("presence_penalty", "0", "a finite number"),
        ("stop", b"END", "texts"),
        ("stop_token_ids", "END", "token ids"),
        ("stop_token_ids", b"END", "token ids"),
        ("stop_token_ids", {3: 4}, "token ids"),
        ("logits_processors", "min_p", "functions"),
        ("ignore_eos", "yes", "True or False"),
    ],
)
def test_what_is_of_another_type_is_told_with_what_was_expected(name, value, expected):
    with pytest.raises(TypeError, match=f"^{re.escape(f'{name}: expected {expected}, got {value!r}')}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "other",
    [{"temperature": 1.0}, {"best_of": 4}, {"logprobs": 1}, {"stop": "x"}, {"draft_tokens": 2}],
    ids=str,
)
def test_what_beam_search_cannot_do_raises_by_name(other):
    with pytest.raises(ValueError, match=f"^{next(iter(other))}: expected .* with beam_width, got"):
        SamplingParams(beam_width=4, **other)


def test_best_of_and_width_hold_n():
    with pytest.raises(ValueError, match="best_of: expected an integer of at least 3, since n is 3, got 2"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(
        ValueError, match="beam_width: expected an integer of at least 3, since n is 3, got 2"
    ):
        SamplingParams(n=3, beam_width=2)


def test_good_parameters_are_kept():
    params = SamplingParams(top_k=1, top_p=1, seed=2**64 - 1, stop_token_ids=[3, 4])
    assert params.stop_token_ids == (3, 4)
    assert params.greedy


def sequence(seed=0, tokens=(1,)):
    return Sequence((0, 0), list(tokens), 1, seed)


def test_greedy_takes_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -torch.inf, 2.0]])
    assert [sample(row, sequence(), SamplingParams(), []) for row in logits] == [1, 0]


def test_penalties_are_those_of_transformers_and_the_presence_penalty_counts_new_tokens_once():
    from transformers import RepetitionPenaltyLogitsProcessor

    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.25)
    tokens, logits = [2, 0, 3, 3], torch.tensor([1.0, 2.0, -1.0, 0.5, 0.0])
    penalised = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([tokens]), logits[None])[0]
    expected = penalised - torch.tensor([0.25, 0, 0, 0.25, 0])  # the first token is the prompt's
    processors = new_processors(params, 1, (), torch.device("cpu"))
    assert torch.equal(process(logits[None], [sequence(tokens=tokens)], processors)[0], expected)


def test_a_logits_processor_may_forbid_tokens():
    def forbid(ids, scores):
        assert ids.tolist() == [[1]]
        return scores.index_fill(1, torch.tensor([2]), -torch.inf)

    params = SamplingParams(logits_processors=[forbid])
    processors = new_processors(params, 1, (), torch.device("cpu"))
    assert sample(torch.tensor([0.0, 1.0, 2.0]), sequence(), params, processors) == 1


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


def test_each_sequence_of_a_request_has_its_own_seed_and_the_first_the_requests():
    seeds = [seed_of(5, i) for i in range(100)]
    assert seeds[0] == 5
    assert len(set(seeds) | {seed_of(6, i) for i in range(100)}) == 200
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_logprobs_are_of_the_token_and_the_likeliest():
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    told = tell_logprobs(logits, 3, 2)
    assert list(told) == [3, 1, 2]
    assert told == pytest.approx({i: float(logits.log_softmax(-1)[i]) for i in (3, 1, 2)})
    assert list(tell_logprobs(logits, 1, 0)) == [1]


def test_uniform_numbers_are_fixed_for_ever_and_spread_evenly():
    assert uniform(0, 0) == 0.0564663990004608
    numbers = torch.tensor([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert (counts - 1000).abs().max() < 5 * math.sqrt(900)
