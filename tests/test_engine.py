"""The engine on a tiny model: whatever the batch, the pool or the faults, each prompt gets its own answer."""

import re

import numpy as np
import pytest
import torch
from conftest import DEVICES
from tiny_models import byte_tokenizer, own_answers, random_prompts, tiny_model

from paged_kv.engine import LLM, AsyncEngine, Engine, FinishReason, SamplingParams
from paged_kv.integrations.transformers import PagedModel
from paged_kv.manager import PagedKVCacheManager

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_tokens=10)
LENGTHS = [7, 1, 12, 3, 9, 20]


@pytest.fixture(scope="module", params=DEVICES)
def model(request):
    return tiny_model("llama").to(request.param)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(model, prompts):
    return own_answers(model, prompts, 10)


def new_llm(model, **settings):
    return LLM(model, **{"block_size": 4, "num_blocks": 60, "max_batch_tokens": 16, **settings})


def assert_whole(llm):
    manager = llm.engine.manager
    manager.check()
    stats = manager.stats()
    assert (stats.num_used_blocks, stats.num_sequences) == (0, 0)


def tokens(outputs):
    return [output.token_ids for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts(model, prompts, expected):
    llm = new_llm(model)
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    assert [output.index for output in outputs] == list(range(len(prompts)))
    assert [output.prompt_ids for output in outputs] == prompts
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
    assert_whole(llm)


def test_requests_may_arrive_while_others_run(model, prompts, expected):
    llm = new_llm(model)
    engine, requests, steps = llm.engine, [], 0
    while len(requests) < len(prompts) or engine.has_work:
        if steps % 3 == 0 and len(requests) < len(prompts):
            requests.append(engine.add_request(prompts[len(requests)], GREEDY))
        engine.step()
        steps += 1
    assert [request.new_token_ids for request in requests] == expected
    assert_whole(llm)


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 7, 1000])
def test_a_step_keeps_its_budget_and_the_budget_changes_no_token(
    model, prompts, expected, max_batch_tokens, monkeypatch
):
    llm = new_llm(model, max_batch_tokens=max_batch_tokens)
    sizes = []
    forward = llm.model.forward
    monkeypatch.setattr(
        llm.model, "forward", lambda ids, *rest: sizes.append(len(ids)) or forward(ids, *rest)
    )
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    assert max(sizes) <= max_batch_tokens
    assert sum(sizes) == sum(LENGTHS) + 9 * len(prompts)  # nothing is computed twice


@pytest.mark.parametrize("num_blocks", [8, 9, 11, 14])
def test_the_least_pool_finishes_everything_with_the_same_tokens(model, prompts, expected, num_blocks):
    llm = new_llm(model, num_blocks=num_blocks)  # 20 + 9 tokens to store: 8 blocks of 4 slots
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    assert 0 < llm.engine.num_preemptions < 20
    assert llm.engine.num_preemptions == sum(output.num_preemptions for output in outputs)
    assert_whole(llm)


def test_prompts_that_can_never_run_are_refused_and_the_others_finish(model, prompts, expected):
    llm = new_llm(model, num_blocks=8)
    mixed = [[], prompts[0], [1] * 33, [5, 128], prompts[3], [1] * 32, [0, 127, -1]]
    outputs = llm.generate(mixed, GREEDY)
    assert [output.error for output in outputs] == [
        "the prompt is empty",
        None,
        "the prompt has 33 tokens; the whole pool of blocks holds 33, at least one new token included",
        "token 1 of the prompt has the id 128; the model's vocabulary has 0 to 127",
        None,
        None,
        "token 2 of the prompt has the id -1; the model's vocabulary has 0 to 127",
    ]
    assert [output.finish_reason is FinishReason.REFUSED for output in outputs] == [
        output.error is not None for output in outputs
    ]
    assert [outputs[1].token_ids, outputs[4].token_ids] == [expected[0], expected[3]]
    assert len(outputs[5].token_ids) == 1  # it fills the pool; the token after it needs no slot
    assert_whole(llm)


def test_a_sequence_ends_at_the_context(model, prompts):
    llm = new_llm(model, max_model_len=16)
    outputs = llm.generate([prompts[0], [1] * 16], SamplingParams(max_tokens=100))
    assert len(outputs[0].token_ids) == 16 - 7
    assert outputs[0].finish_reason is FinishReason.LENGTH
    assert (
        outputs[1].error == "the prompt has 16 tokens; the context holds 16, at least one new token included"
    )
    with pytest.raises(ValueError, match="max_model_len: expected 2 to 512"):
        new_llm(model, max_model_len=513)


def test_stop_tokens_end_a_request_and_are_part_of_it(model, prompts, expected):
    stop = expected[0][4]
    first = expected[0].index(stop) + 1
    llm = new_llm(model)
    output = llm.generate([prompts[0]], SamplingParams(max_tokens=10, stop_token_ids=[stop]))[0]
    assert (output.token_ids, output.finish_reason) == (expected[0][:first], FinishReason.STOP)


@pytest.mark.parametrize("as_list", [False, True], ids=["one", "list"])
def test_the_models_own_end_tokens_stop_unless_ignored(as_list, prompts, expected):
    model = tiny_model("llama")
    eos = expected[2][5]
    model.generation_config.eos_token_id = [127, eos] if as_list else eos
    own = own_answers(model, [prompts[2]], 10)[0]
    assert own == expected[2][: expected[2].index(eos) + 1]
    llm = new_llm(model)
    stopping, ignoring = llm.generate(
        [prompts[2]] * 2, [GREEDY, SamplingParams(max_tokens=10, ignore_eos=True)]
    )
    assert (stopping.token_ids, stopping.finish_reason) == (own, FinishReason.STOP)
    assert (ignoring.token_ids, ignoring.finish_reason) == (expected[2], FinishReason.LENGTH)


SAMPLED = SamplingParams(max_tokens=10, temperature=1.5, top_k=40, top_p=0.9, seed=7)


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(model, prompts):
    alone = [new_llm(model).generate([prompt], SAMPLED)[0].token_ids for prompt in prompts]
    assert tokens(new_llm(model).generate(prompts, SAMPLED)) == alone
    least = new_llm(model, num_blocks=8)
    assert tokens(least.generate(prompts, SAMPLED)) == alone
    assert least.engine.num_preemptions > 0


def test_other_seeds_and_no_seed_give_other_tokens(model, prompts):
    llm = new_llm(model)
    params = [SamplingParams(max_tokens=10, temperature=1.5, seed=seed) for seed in (1, 2, None, None)]
    answers = tokens(llm.generate([prompts[0]] * 4, params))
    assert len({tuple(answer) for answer in answers}) == 4


def test_a_stream_yields_each_token_as_it_comes(model, prompts, expected):
    llm = new_llm(model)
    seen = {index: [] for index in range(len(prompts))}
    for output in llm.stream(prompts, GREEDY):
        assert output.token_ids[:-1] == seen[output.index]
        assert output.finished == (len(output.token_ids) == 10)
        seen[output.index] = output.token_ids
    assert list(seen.values()) == expected


def test_closing_a_stream_aborts_what_runs(model, prompts, expected):
    llm = new_llm(model, num_blocks=14)
    stream = llm.stream(prompts, GREEDY)
    next(stream)
    assert llm.engine.manager.stats().num_used_blocks > 0
    stream.close()
    assert not llm.engine.has_work
    assert_whole(llm)
    assert tokens(llm.generate(prompts, GREEDY)) == expected


def test_two_streams_share_the_engine_and_lose_nothing(model, prompts, expected):
    llm = new_llm(model)
    first, second = llm.stream(prompts[:3], GREEDY), llm.stream(prompts[3:], GREEDY)
    outputs = [next(first), next(second), *first, *second]  # the first one steps for both
    finished = [output.token_ids for output in outputs if output.finished]
    assert sorted(finished) == sorted(expected)
    assert_whole(llm)


def test_a_bad_prompt_leaves_no_request_behind(model, prompts):
    llm = new_llm(model)
    with pytest.raises(TypeError, match="integer"):
        llm.generate([prompts[0], [1, 2.5]])
    assert not llm.engine.has_work


def test_aborting_frees_at_once_and_disturbs_nobody(model, prompts, expected):
    llm = new_llm(model, max_num_seqs=3)
    requests = [llm.engine.add_request(prompt, GREEDY) for prompt in prompts]
    for _ in range(3):
        llm.engine.step()
    for aborted in (requests[0], requests[5]):  # one runs, one waits
        llm.engine.abort(aborted)
        llm.engine.abort(aborted)
        assert aborted.finish_reason is FinishReason.ABORTED
    assert requests[0].request_id not in llm.engine.manager
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.new_token_ids for request in requests[1:5]] == expected[1:5]
    assert_whole(llm)


@pytest.mark.parametrize("failing_step", [0, 1, 3, 8])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_model_that_raises_leaves_the_pool_whole_and_the_requests_in_line(
    model, prompts, expected, failing_step, error, monkeypatch
):
    llm = new_llm(model, num_blocks=14)
    forward, steps = llm.model.forward, iter(range(1000))

    def fail_once(*args):
        logits = forward(*args)
        if next(steps) == failing_step:
            raise error("injected")
        return logits

    monkeypatch.setattr(llm.model, "forward", fail_once)
    requests = [llm.engine.add_request(prompt, GREEDY) for prompt in prompts]
    with pytest.raises(error, match="injected"):
        while True:
            llm.engine.step()
    assert_whole(llm)
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.new_token_ids for request in requests] == expected
    assert_whole(llm)


def test_generate_passes_an_error_on_and_forgets_its_requests(model, prompts, expected, monkeypatch):
    llm = new_llm(model)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work
    assert_whole(llm)
    assert tokens(llm.generate(prompts, GREEDY)) == expected


def test_cache_use_counts_tokens_blocks_and_waste(model):
    llm = new_llm(model)
    llm.generate([[1, 2, 3, 4, 5], [6, 7, 8]], SamplingParams(max_tokens=3))
    use = llm.cache_use
    # After each of 3 steps: 5 + 3, 6 + 4, 7 + 5 tokens in 2 + 1, 2 + 1, 2 + 2 blocks of 4 slots.
    assert (use.num_steps, use.peak_blocks, use.tokens_at_peak, use.peak_sequences) == (3, 4, 12, 2)
    assert use.waste_at_peak == 1 - 12 / 16
    assert use.mean_waste == pytest.approx((1 - 8 / 12 + 1 - 10 / 12 + 1 - 12 / 16) / 3)
    assert use.bytes_per_token == 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32
    assert use.peak_bytes == 16 * use.bytes_per_token
    assert use.contiguous_tokens == 2 * 512
    assert use.contiguous_waste == 1 - 12 / 1024
    assert "12 tokens held in 4 blocks" in str(use)


def test_settings_and_arguments_are_checked_by_name(model, prompts):
    for name in ("max_batch_tokens", "max_num_seqs"):
        with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 1, got 0"):
            new_llm(model, **{name: 0})
        with pytest.raises(TypeError, match=f"{name}: expected an integer of at least 1, got 2.5"):
            new_llm(model, **{name: 2.5})
    with pytest.raises(TypeError, match=r"max_model_len: expected an integer of at least 2, got 7\.0"):
        new_llm(model, max_model_len=7.0)
    with pytest.raises(TypeError, match="priority: expected an integer, got 'high'"):
        new_llm(model).generate(prompts, priority="high")
    with pytest.raises(TypeError, match="salt: expected a text or None, got 5"):
        new_llm(model).generate(prompts, salt=5)
    with pytest.raises(ValueError, match="stop: expected no texts where there is no tokenizer"):
        new_llm(model).generate(prompts, SamplingParams(stop="x"))
    expected = (
        r"dtype: expected None for a loaded model, which has its own \(torch.float32\), got torch.bfloat16"
    )
    with pytest.raises(ValueError, match=f"^{expected}$"):
        new_llm(model, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="num_blocks, memory"):
        new_llm(model, memory=1 << 20)
    with pytest.raises(ValueError, match="params: expected one or 6"):
        new_llm(model).generate(prompts, [GREEDY])
    with pytest.raises(TypeError, match=r"^params\[2\]: expected a SamplingParams, got int$"):
        new_llm(model).generate(prompts, [GREEDY, GREEDY, 5, *[GREEDY] * 3])
    with pytest.raises(
        ValueError, match=r"prompt: expected token ids, since .* without a tokenizer, got 'text'"
    ):
        new_llm(model).generate("text")
    with pytest.raises(TypeError, match="prompts: expected texts or lists of token ids, got 5"):
        new_llm(model).generate([5, 6])
    with pytest.raises(TypeError, match="prompts: expected texts or lists of token ids, got b'text' among"):
        new_llm(model).generate([b"text"])
    with pytest.raises(ValueError, match="salt: expected text that UTF-8 can encode, got"):
        new_llm(model).generate(prompts, salt="\udce9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "model: expected a model of transformers, or the path of one, got NoneType"),
        ({"model": None, "dtype": torch.float32}, "model: expected a model of transformers, or the path"),
        ({"model": torch.nn.Linear(1, 1)}, "model: expected a model of transformers, or .*, got Linear"),
        ({"model": b"folder"}, "model: expected a model of transformers, or the path of one, got bytes"),
        ({"tokenizer": "gpt2"}, "tokenizer: expected a tokenizer of transformers or None, got 'gpt2'"),
        (
            {"model": "folder", "dtype": "float32"},
            "dtype: expected torch.float32 or torch.float16 or torch.bfloat16 or None, got 'float32'",
        ),
        ({"dtype": 32}, "dtype: expected torch.float32 or torch.float16 or torch.bfloat16 or None, got 32"),
        (
            {"cache_dtype": "int8"},
            "cache_dtype: expected torch.float32 or .* or torch.int8 or None, got 'int8'",
        ),
        ({"block_size": None}, "block_size: expected an integer from 1 to 1024, got None"),
        ({"num_blocks": "60"}, "num_blocks: expected an integer of at least 1, got '60'"),
        ({"num_host_blocks": None}, "num_host_blocks: expected an integer of at least 0, got None"),
        ({"compile": "yes"}, "compile: expected True or False, got 'yes'"),
        ({"pack_weights": 1}, "pack_weights: expected True or False, got 1"),
        ({"prefix_cache": None}, "prefix_cache: expected True or False, got None"),
    ],
)
def test_an_llm_is_not_made_of_other_types(model, arguments, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        new_llm(**{"model": model, **arguments})


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        (None, {}, "prompts: expected texts or lists of token ids, got None"),
        ({"a": 1}, {}, "prompts: expected texts or lists of token ids, got {'a': 1}"),
        ({"text"}, {}, "prompts: expected texts or lists of token ids, got {'text'}"),
        (b"text", {}, "prompts: expected texts or lists of token ids, got b'text'"),
        ([[1], {2: 3}], {}, "prompts: expected texts or lists of token ids, got {2: 3} among them"),
        ([[1], {2}], {}, r"prompts: expected texts or lists of token ids, got \{2\} among them"),
        ([[1], [1, 2.5]], {}, r"prompts\[1\]: expected token ids, which are integers, got 2\.5"),
        ([[1, None]], {}, r"prompts\[0\]: expected token ids, which are integers, got None"),
        ([[True]], {}, r"prompts\[0\]: expected token ids, which are integers, got True"),
        ([["text"]], {}, r"prompts\[0\]: expected token ids, which are integers, got 'text'"),
        ([[1]], {"params": None}, "params: expected SamplingParams, or a list of them, got None"),
        ([[1]], {"params": {"n": 2}}, "params: expected SamplingParams, or a list of them, got {'n': 2}"),
        ([[1]], {"params": [None]}, r"params\[0\]: expected a SamplingParams, got NoneType"),
        ([[1]], {"params": "greedy"}, "params: expected SamplingParams, or a list of them, got 'greedy'"),
    ],
)
def test_a_request_is_not_made_of_other_types(model, prompts, arguments, message):
    llm = new_llm(model)
    with pytest.raises(TypeError, match=f"^{message}"):
        llm.generate(prompts, **arguments)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"dtype": torch.int8}, "dtype: expected torch.float32 or .* or None, got torch.int8"),
        (ValueError, {"dtype": torch.float64}, "dtype: expected torch.float32 or .*, got torch.float64"),
        (
            ValueError,
            {"cache_dtype": torch.int32},
            "cache_dtype: expected torch.float32 or .*, got torch.int32",
        ),
        (ValueError, {"cache_dtype": torch.float64}, "cache_dtype: expected .*, got torch.float64"),
        (
            ValueError,
            {"dtype": torch.bfloat16, "cache_dtype": torch.float16},
            "cache_dtype: expected the model's own, torch.bfloat16, or a quantised one, got torch.float16",
        ),
        (
            ValueError,
            {"pack_weights": True, "compile": True},
            "pack_weights: expected False with compile, got True",
        ),
    ],
)
def test_what_no_model_can_have_is_refused_before_one_is_loaded(error, arguments, message, monkeypatch):
    monkeypatch.setattr("paged_kv.engine.llm.load", None)
    with pytest.raises(error, match=f"^{message}$"):
        LLM("folder", **arguments)


USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("error", "prompt", "message"),
    [
        (TypeError, None, "prompt: expected a text or a list of messages, got None"),
        (TypeError, b"text", "prompt: expected a text or a list of messages, got b'text'"),
        (TypeError, USER, f"prompt: expected a text or a list of messages, got {USER}"),
        (TypeError, {"text"}, "prompt: expected a text or a list of messages, got {'text'}"),
        (ValueError, [], "prompt: expected a text or a list of one message or more, got []"),
        *(
            (
                error,
                [USER, wrong],
                f"prompt[1]: expected a dict with texts for 'role' and 'content', got {wrong!r}",
            )
            for error, wrong in (
                (TypeError, "Hello"),
                (TypeError, ("user", "Hello")),
                (TypeError, 5),
                (ValueError, {}),
                (ValueError, {"role": "user"}),
                (ValueError, {"content": "Hello"}),
                (TypeError, {"role": "user", "content": None}),
                (TypeError, {"role": "user", "content": 5}),
                (TypeError, {"role": 5, "content": "Hello"}),
            )
        ),
    ],
)
def test_messages_are_checked_before_the_template_sees_them(model, error, prompt, message):
    for chat in False, True:
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            new_llm(model).encode(prompt, chat=chat)


@pytest.mark.parametrize("chat", ["x", 1, None])
def test_whether_it_is_a_chat_is_true_or_false(model, chat):
    with pytest.raises(TypeError, match=f"^chat: expected True or False, got {chat!r}$"):
        new_llm(model).encode("text", chat=chat)


def test_a_chat_wants_a_template(model):
    llm = new_llm(model, tokenizer=byte_tokenizer())
    words = "since this model's tokenizer has no chat template, got"
    with pytest.raises(ValueError, match=f"^chat: expected False, {words} True$"):
        llm.encode("text", chat=True)
    with pytest.raises(ValueError, match=f"^prompt: expected a text, {words} {re.escape(repr([USER]))}$"):
        llm.encode([USER])


def test_what_an_engine_is_handed_is_checked(model):
    llm = new_llm(model)
    for prompt_ids in None, b"text", {1: 2}, {1}, torch.tensor(1):
        got = re.escape(repr(prompt_ids))
        with pytest.raises(
            TypeError, match=f"^prompt_ids: expected token ids, which are integers, got {got}$"
        ):
            llm.engine.add_request(prompt_ids)
    for token in 1.5, None, True, "text", np.True_, torch.tensor(0.5):
        got = re.escape(repr(token))
        with pytest.raises(
            TypeError, match=f"^prompt_ids: expected token ids, which are integers, got {got}$"
        ):
            llm.engine.add_request([1, token])
    with pytest.raises(TypeError, match=r"^on_token: expected a function or None, got 5$"):
        llm.engine.add_request([1], on_token=5)
    with pytest.raises(TypeError, match=r"^model: expected a model of transformers, got NoneType$"):
        PagedModel(None)
    with pytest.raises(TypeError, match=r"^model: expected a PagedModel, got LlamaForCausalLM$"):
        Engine(model, llm.engine.cache, llm.engine.manager)
    with pytest.raises(TypeError, match=r"^cache: expected a PagedKVCache, got PagedKVCacheManager$"):
        Engine(llm.model, llm.engine.manager, llm.engine.cache)
    with pytest.raises(TypeError, match=r"^request: expected a Request, got int$"):
        llm.engine.abort(0)
    with pytest.raises(TypeError, match=r"^llm: expected an LLM, got Engine$"):
        AsyncEngine(llm.engine)
    assert not llm.engine.has_work


def test_the_pool_may_be_sized_in_bytes(model):
    llm = LLM(model, block_size=4, memory=20 * 4 * 3 * 2 * 2 * 16 * 4)
    assert llm.engine.manager.num_blocks == 20


def test_an_engine_can_be_put_together_by_hand(model, prompts, expected):
    llm = new_llm(model)
    cache = llm.model.new_cache(2, num_blocks=100)
    engine = Engine(llm.model, cache, PagedKVCacheManager(100, 2))
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    while engine.has_work:
        engine.step()
    assert [request.new_token_ids for request in requests] == expected
