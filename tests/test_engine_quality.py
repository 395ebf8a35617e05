"""The perplexity that a quantised cache is measured by is the model's own where the cache is not quantised."""

import math

import pytest
import torch
from tiny_models import random_prompts, tiny_model

from bench.perplexity import perplexity

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def ids():
    return random_prompts([75])[0]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 16, 75, 100])
def test_perplexity_is_the_models_own(name, ids, chunk):
    model = tiny_model(name)
    with torch.inference_mode():
        tokens = torch.tensor([ids])
        own = math.exp(model(tokens, labels=tokens).loss)
    assert perplexity(model, ids, chunk=chunk) == pytest.approx(own, rel=1e-4)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.int8, 0.05), (torch.float8_e4m3fn, 0.2), (torch.float8_e5m2, 0.4)], ids=str
)
def test_a_quantised_cache_changes_it_a_little(ids, dtype, limit):
    model = tiny_model("llama")
    exact, found = perplexity(model, ids), perplexity(model, ids, cache_dtype=dtype)
    assert found != exact
    assert abs(math.log(found / exact)) < limit


def test_one_token_has_none(ids):
    with pytest.raises(ValueError, match="token_ids: expected two or more, got 1"):
        perplexity(tiny_model("llama"), ids[:1])
