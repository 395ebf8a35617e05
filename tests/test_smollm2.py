"""A real model: SmolLM2-135M-Instruct, out of blocks and batched, says what it says by itself."""

from pathlib import Path

import pytest
import torch
from tiny_models import own_answers

from bench.perplexity import perplexity
from paged_kv import LLM, SamplingParams
from paged_kv.integrations.loading import default_model, load

# Two threads gain little on so small a model, and lose much where tests run side by side.
pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 12
PROMPTS = [
    "Gravity is",
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain,",
    "def fibonacci(n):\n",
    "Memory is cut into pages so that programs need not lie in one piece. The table that tells where",
    "Q: How many legs does a spider have?\nA:",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen,",
    "A librarian wrote: " + "the shelf was full, the reader was late, and the lamp was low. " * 5,
    "Wasser kocht bei hundert Grad, und Eis",
]


@pytest.fixture(scope="module")
def loaded():
    return load(default_model(), torch.float32)


def test_batched_greedy_answers_equal_the_models_own(loaded):
    model, tokenizer = loaded
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert len({len(prompt) for prompt in ids}) == len(PROMPTS)
    expected = own_answers(model, ids, MAX_TOKENS)
    llm = LLM(model, tokenizer=tokenizer, num_blocks=64, max_batch_tokens=64)  # the longest comes in chunks
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [output.token_ids for output in outputs] == expected
    assert [output.text for output in outputs] == [
        tokenizer.decode(answer, skip_special_tokens=True) for answer in expected
    ]
    assert outputs[1].text.startswith(" Paris")
    assert llm.engine.manager.stats().num_used_blocks == 0


def test_a_chat_prompt_is_answered_and_ends_by_itself(loaded):
    model, tokenizer = loaded
    llm = LLM(model, tokenizer=tokenizer, num_blocks=16)
    ids = llm.encode("What is the capital of France?", chat=True)
    output = llm.generate([ids], SamplingParams(max_tokens=40))[0]
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason == "stop"


def test_a_chat_reuses_its_history(loaded):
    model, tokenizer = loaded
    llm = LLM(model, tokenizer=tokenizer, num_blocks=32)
    chat, cached = [], []
    for question in ("What is the capital of France?", "And of Italy?"):
        chat.append({"role": "user", "content": question})
        output = llm.generate([llm.encode(chat)], SamplingParams(max_tokens=12))[0]
        cold = LLM(model, tokenizer=tokenizer, num_blocks=32, prefix_cache=False)
        assert (
            output.token_ids == cold.generate([llm.encode(chat)], SamplingParams(max_tokens=12))[0].token_ids
        )
        chat.append({"role": "assistant", "content": output.text})
        cached.append(output.num_cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= len(llm.encode(chat[:1])) // 16 * 16


def test_quantised_caches_cost_little_perplexity(loaded):
    model, tokenizer = loaded
    # The beginning of Alice's Adventures in Wonderland, Lewis Carroll, 1865.
    ids = tokenizer((Path(__file__).parent / "data/alice.txt").read_text()).input_ids[:400]
    exact = perplexity(model, ids)
    assert 2 < exact < 40
    for dtype, limit in ((torch.int8, 0.01), (torch.float8_e4m3fn, 0.03), (torch.float8_e5m2, 0.1)):
        assert abs(perplexity(model, ids, cache_dtype=dtype) / exact - 1) < limit
