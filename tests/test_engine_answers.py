"""What a request may ask for, on tiny models: samples, beams, drafts, stops, and the prefix cache under all of it."""

import copy
from functools import partial

import pytest
import torch
from test_engine import assert_whole, new_llm, tokens
from tiny_models import MODELS, byte_tokenizer, own_answers, random_prompts, tiny_model

from paged_kv.engine import LLM, FinishReason, SamplingParams
from paged_kv.integrations.transformers import PagedModel

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_tokens=10)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def prompts():
    shared = random_prompts([19])[0]
    return [shared[:18], shared, [*shared[:10], 5, 6, 7], *random_prompts([7, 1, 12])]


@pytest.fixture(scope="module")
def expected(model, prompts):
    return own_answers(model, prompts, 10)


# The prefix cache


@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 8}, {"num_blocks": 9, "num_host_blocks": 4}], ids=str
)
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
def test_no_token_depends_on_the_cache_the_pool_or_the_batch(
    model, prompts, expected, prefix_cache, settings
):
    llm = new_llm(model, prefix_cache=prefix_cache, **settings)
    for _ in range(2):  # missed, then hit
        assert tokens(llm.generate(prompts, GREEDY)) == expected
        assert_whole(llm)
    assert [tokens(llm.generate([prompt], GREEDY))[0] for prompt in prompts] == expected
    assert (llm.metrics.cached_tokens > 0) == prefix_cache


@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 8}, {"num_blocks": 9, "num_host_blocks": 4}], ids=str
)
def test_logits_are_as_near_to_the_truth_as_the_models_own(model, prompts, expected, settings):
    def log_probs(model):
        rows = []
        for prompt, answer in zip(prompts, expected, strict=True):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            rows.append(logits.log_softmax(-1))
        return torch.cat(rows)

    with torch.inference_mode():
        truth, own = log_probs(copy.deepcopy(model).double()), log_probs(model)
    llm = new_llm(model, **settings)
    for _ in range(2):  # missed, then hit
        outputs = llm.generate(prompts, SamplingParams(max_tokens=10, logprobs=128))
        told = [told for output in outputs for told in output.completions[0].logprobs]
        ours = torch.tensor([[step[token] for token in range(128)] for step in told])
        assert (ours - truth).abs().max() <= 2 * (own - truth).abs().max()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama", "gemma4")])
def test_every_model_answers_alike_from_a_warm_cache(name):
    model, prompts = tiny_model(name), random_prompts([21, 6])
    llm = new_llm(model)
    cold = llm.generate(prompts, GREEDY)
    assert tokens(cold) == own_answers(model, prompts, 10)
    warm = llm.generate(prompts, GREEDY)
    assert tokens(warm) == tokens(cold)
    assert [output.num_cached_tokens for output in warm] == [20, 4]


def test_a_second_turn_finds_the_first_with_its_answer(model, prompts):
    llm = new_llm(model)
    first = llm.generate([prompts[0]], GREEDY)[0]
    turn = [*prompts[0], *first.token_ids, 1, 2, 3]
    second = llm.generate([turn], GREEDY)[0]
    assert second.num_cached_tokens == (18 + 9) // 4 * 4
    assert second.token_ids == own_answers(model, [turn], 10)[0]
    assert llm.metrics.hit_rate == second.num_cached_tokens / (18 + len(turn))


def test_a_salt_keeps_requests_apart(model, prompts):
    llm = new_llm(model)
    cached = [
        llm.generate([prompts[0]], GREEDY, salt=salt)[0].num_cached_tokens
        for salt in ("a", "b", None, "a", None)
    ]
    assert cached == [0, 0, 0, 16, 16]


def test_a_block_whose_step_failed_is_not_found(model, prompts, expected, monkeypatch):
    llm = new_llm(model)
    forward = llm.model.forward
    monkeypatch.setattr(llm.model, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate(prompts, GREEDY)
    monkeypatch.setattr(llm.model, "forward", forward)
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    assert llm.generate([prompts[3]], GREEDY)[0].num_cached_tokens == 4


# Samples

SAMPLED = SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=5)


@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 19}, {"num_blocks": 19, "num_host_blocks": 30}], ids=str
)
def test_samples_depend_neither_on_siblings_nor_on_the_batch(model, prompts, settings):
    alone = [sequence.token_ids for sequence in new_llm(model).generate([prompts[0]], SAMPLED)[0].completions]
    assert len({tuple(answer) for answer in alone}) == 5
    first = new_llm(model).generate([prompts[0]], SamplingParams(max_tokens=8, temperature=1.5, seed=3))[0]
    assert first.token_ids == alone[0]
    llm = new_llm(model, prefix_cache=not settings, **settings)
    outputs = llm.generate([prompts[1], prompts[0], prompts[3]], SAMPLED)
    assert [completion.token_ids for completion in outputs[1].completions] == alone
    assert (llm.engine.num_preemptions > 0) == bool(settings)
    assert_whole(llm)


def test_the_prompt_of_samples_is_computed_once_and_shared(model, prompts):
    llm = new_llm(model)
    llm.generate([prompts[1]], SAMPLED)
    assert llm.metrics.computed_tokens == 19 + 5 * 7
    assert llm.cache_use.peak_blocks == 4 + 5 * 3  # of 26 tokens each: 16 shared in 4 blocks, 10 in 3 each
    assert llm.cache_use.saved_at_peak == 4 * 4


def test_samples_end_on_their_own(model, prompts):
    full = new_llm(model).generate([prompts[0]], SAMPLED)[0].completions
    stop = full[2].token_ids[3]
    output = new_llm(model).generate(
        [prompts[0]],
        SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=5, stop_token_ids=[stop]),
    )[0]
    for whole, ended in zip(full, output.completions, strict=True):
        length = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else 8
        assert ended.token_ids == whole.token_ids[:length]
        assert (ended.finish_reason is FinishReason.STOP) == (stop in whole.token_ids)


def test_best_of_gives_the_likeliest_of_all(model, prompts):
    llm = new_llm(model)
    every = llm.generate(
        [prompts[0]], SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=5, logprobs=0)
    )[0]
    means = [
        sum(told[token] for told, token in zip(c.logprobs, c.token_ids, strict=True)) / 8
        for c in every.completions
    ]
    best = sorted(range(5), key=lambda i: -means[i])[:2]
    outputs = list(
        llm.stream([prompts[0]], SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=2, best_of=5))
    )
    assert len(outputs) == 1  # nothing is known before the end
    assert [c.token_ids for c in outputs[0].completions] == [every.completions[i].token_ids for i in best]
    assert [c.score for c in outputs[0].completions] == pytest.approx([means[i] for i in best])
    assert {c.score for c in every.completions} == {None}  # nothing was compared


# Beams


def own_beams(model, prompt, *, width, n=1, max_tokens=10, **settings):
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=n,
        max_new_tokens=max_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    answers = []
    for row in output.sequences[:, len(prompt) :].tolist():
        eos = settings.get("eos_token_id", [])
        ends = [i for i, token in enumerate(row) if token in eos]
        answers.append(row[: ends[0] + 1] if ends else row)
    return answers, output.sequences_scores.tolist()


BEAMS = [
    {"width": 2},
    {"width": 4, "n": 4},
    {"width": 4, "n": 2, "length_penalty": 0.5},
    {"width": 3, "n": 3, "eos_token_id": [7, 30, 90, 100, 12, 55]},
    {"width": 4, "n": 4, "eos_token_id": list(range(0, 128, 5)), "early_stopping": True},
    {"width": 4, "n": 4, "eos_token_id": list(range(0, 128, 5)), "length_penalty": 2.0},
    {"width": 4, "n": 3, "eos_token_id": list(range(0, 128, 9)), "early_stopping": "never"},
    {
        "width": 3,
        "n": 3,
        "eos_token_id": list(range(0, 128, 9)),
        "early_stopping": "never",
        "length_penalty": -1.0,
    },
    {"width": 3, "n": 3, "eos_token_id": list(range(127))},  # fewer tokens than beams go on
]


def beam_params(case, max_tokens=10):
    names = {"width": "beam_width", "eos_token_id": "stop_token_ids"}
    return SamplingParams(max_tokens=max_tokens, **{names.get(name, name): v for name, v in case.items()})


@pytest.mark.parametrize("case", BEAMS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_beams_and_scores_equal_those_of_transformers(name, case):
    model, prompts = tiny_model(name), random_prompts([9, 1, 14])
    outputs = new_llm(model).generate(prompts, beam_params(case))
    for prompt, output in zip(prompts, outputs, strict=True):
        answers, scores = own_beams(model, prompt, **case)
        assert [c.token_ids for c in output.completions] == answers
        assert [c.score for c in output.completions] == pytest.approx(scores, rel=1e-4)


@pytest.mark.parametrize("settings", [{"num_blocks": 20}, {"num_blocks": 20, "num_host_blocks": 40}], ids=str)
def test_beams_survive_preemption_beside_others(model, prompts, expected, settings):
    llm = new_llm(model, max_batch_tokens=8, **settings)
    case = {"width": 4, "n": 2}
    params = [beam_params(case), GREEDY, beam_params(case), GREEDY]
    outputs = llm.generate(prompts[:4], params)
    assert llm.engine.num_preemptions > 0
    for i in (0, 2):
        assert [c.token_ids for c in outputs[i].completions] == own_beams(model, prompts[i], **case)[0]
    assert [outputs[1].token_ids, outputs[3].token_ids] == [expected[1], expected[3]]
    assert_whole(llm)


def test_beams_end_where_every_token_does_and_disturb_nobody(model, prompts, expected):
    llm = new_llm(model, num_blocks=2000, max_num_seqs=200, max_batch_tokens=200)
    everything = SamplingParams(max_tokens=10, beam_width=3, n=3, stop_token_ids=range(128))
    too_many = SamplingParams(max_tokens=10, beam_width=129)
    outputs = llm.generate(prompts[:3], [everything, too_many, GREEDY])
    first = model(torch.tensor([prompts[0]])).logits[0, -1].log_softmax(-1).topk(3)
    assert [c.token_ids for c in outputs[0].completions] == first.indices[:, None].tolist()
    assert [c.score for c in outputs[0].completions] == pytest.approx(first.values.tolist(), rel=1e-4)
    assert outputs[1].error == "it asks for 129 beams; the vocabulary has 128 tokens"
    assert outputs[2].token_ids == expected[2]
    assert_whole(llm)


def test_beams_take_the_penalties_of_transformers(model, prompts):
    params = SamplingParams(max_tokens=8, beam_width=3, repetition_penalty=1.3)
    output = new_llm(model).generate([prompts[1]], params)[0]
    answers, scores = own_beams(model, prompts[1], width=3, max_tokens=8, repetition_penalty=1.3)
    assert output.token_ids == answers[0]
    assert output.completions[0].score == pytest.approx(scores[0], rel=1e-4)


def test_beams_hold_fewer_blocks_than_beams_apart(model, prompts):
    llm = new_llm(model)
    llm.generate([prompts[1]], beam_params({"width": 4}))
    use = llm.cache_use
    assert use.peak_blocks < use.peak_blocks + use.saved_at_peak == 4 * 7
    assert "sharing saved" in str(use)


def test_beams_have_text(model):
    llm = new_llm(model, tokenizer=byte_tokenizer())
    output = llm.generate(["hello"], SamplingParams(max_tokens=5, beam_width=2))[0]
    assert output.text == byte_tokenizer().decode(output.token_ids)
    assert len(output.token_ids) == 5


# Drafts


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 13}], ids=str)
@pytest.mark.parametrize("draft_tokens", [1, 3, 8])
def test_drafts_change_no_token_and_save_steps(model, settings, draft_tokens):
    prompts = [[3, 1, 4] * 5, [9, 8, 7, 6, 5] * 3, [2, 2, 2, 2]]
    answers = own_answers(model, prompts, 32)
    plain, drafting = new_llm(model), new_llm(model, **settings)
    params = SamplingParams(max_tokens=32, draft_tokens=draft_tokens)
    assert tokens(plain.generate(prompts, SamplingParams(max_tokens=32))) == answers
    assert tokens(drafting.generate(prompts, params)) == answers
    assert drafting.metrics.drafted_tokens > 0
    assert_whole(drafting)


def test_right_guesses_are_accepted_and_counted(model, prompts, expected, monkeypatch):
    answer = expected[1]
    monkeypatch.setattr(
        "paged_kv.engine.drafts.PromptLookup.guess",
        lambda self, ids, count: [*answer[len(ids) - 19 :], 0, 0][: max(0, count)],
    )
    llm = new_llm(model)
    output = llm.generate([prompts[1]], SamplingParams(max_tokens=10, draft_tokens=3))[0]
    assert output.token_ids == answer
    assert llm.metrics.num_steps == 2 + 1 + 2  # a prompt in two chunks, then 9 tokens, at most 4 a step
    assert llm.metrics.accepted_tokens == llm.metrics.drafted_tokens == 6
    assert llm.metrics.acceptance_rate == 1
    again = llm.generate([prompts[1] + answer], GREEDY)[0]  # what was published is what was accepted
    assert again.token_ids == own_answers(model, [prompts[1] + answer], 10)[0]
    assert again.num_cached_tokens == 28


def test_wrong_guesses_cost_nothing_but_work(model, prompts, expected, monkeypatch):
    monkeypatch.setattr(
        "paged_kv.engine.drafts.PromptLookup.guess", lambda self, ids, count: [0] * max(0, count)
    )
    llm = new_llm(model)
    assert tokens(llm.generate(prompts, SamplingParams(max_tokens=10, draft_tokens=3))) == expected
    assert llm.metrics.acceptance_rate < 0.2
    assert tokens(llm.generate(prompts, GREEDY)) == expected


def test_drafts_go_with_samples_penalties_and_stops(model):
    prompts = [[3, 1, 4] * 5, [9, 8, 7, 6, 5] * 3]
    settings = {"max_tokens": 24, "temperature": 0.5, "seed": 1, "n": 3, "repetition_penalty": 1.1}
    plain = new_llm(model).generate(prompts, SamplingParams(**settings))
    drafting = new_llm(model).generate(prompts, SamplingParams(**settings, draft_tokens=4))
    assert [[c.token_ids for c in output.completions] for output in drafting] == [
        [c.token_ids for c in output.completions] for output in plain
    ]


# Ends, penalties and log-probabilities


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_a_stop_text_ends_the_text_before_it(draft_tokens):
    model, tokenizer = tiny_model("llama", vocab_size=256), byte_tokenizer()
    llm = new_llm(model, tokenizer=tokenizer)
    whole = own_answers(model, [tokenizer("hello").input_ids], 20)[0]
    text = tokenizer.decode(whole)
    stop = next(
        text[i : i + 2]
        for i in range(6, 18)
        if text[i : i + 2].isprintable() and "\ufffd" not in text[i : i + 2]
    )
    pieces = []
    params = SamplingParams(max_tokens=20, stop=stop, draft_tokens=draft_tokens)
    for output in llm.stream(["hello"], params):
        pieces.append(output.new_text)
    assert output.text == "".join(pieces) == text[: text.index(stop)]
    assert output.finish_reason is FinishReason.STOP
    assert stop in tokenizer.decode(output.token_ids)
    assert len(output.token_ids) < 20


def test_nothing_ends_before_min_tokens(model, prompts, expected):
    stop = expected[1][2]
    first = expected[1].index(stop)
    params = SamplingParams(max_tokens=10, min_tokens=first + 2, stop_token_ids=[stop])
    output = new_llm(model).generate([prompts[1]], params)[0]
    ids = torch.tensor([prompts[1]])
    own = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=10,
        min_new_tokens=first + 2,
        eos_token_id=stop,
        pad_token_id=0,
    )[0, 19:].tolist()
    assert output.token_ids == own
    assert len(own) >= first + 2


def test_a_repetition_penalty_gives_what_generate_gives(model, prompts):
    llm = new_llm(model)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=10, repetition_penalty=1.4))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        own = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=10,
            repetition_penalty=1.4,
            pad_token_id=0,
        )
        assert output.token_ids == own[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_the_model(model, prompts):
    output = new_llm(model).generate([prompts[1]], SamplingParams(max_tokens=6, logprobs=3))[0]
    ids = torch.tensor([prompts[1] + output.token_ids])
    with torch.inference_mode():
        own = model(ids).logits[0].log_softmax(-1)[18:-1]
    for row, token, told in zip(own, output.token_ids, output.completions[0].logprobs, strict=True):
        assert list(told) == row.topk(3).indices.tolist()  # greedy: the token is the likeliest
        assert told[token] == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantised_caches_answer_from_their_blocks(model, prompts, dtype):
    llm = LLM(model, block_size=4, num_blocks=60, cache_dtype=dtype)
    cold, warm = (llm.generate(prompts, SamplingParams(max_tokens=10, n=2)) for _ in range(2))
    assert tokens(cold) == tokens(warm)
    assert llm.metrics.cached_tokens > 0
    assert llm.cache_use.bytes_per_token == 3 * 2 * 2 * (16 + 4)  # a byte for an element, a scale for a head
    assert_whole(llm)


def test_a_cache_of_another_float_is_refused_at_once(model):
    words = "dtype: expected the model's own, torch.float32, or a quantised one, got torch.float16"
    with pytest.raises(ValueError, match=f"^cache_{words}$"):
        new_llm(model, cache_dtype=torch.float16)
    with pytest.raises(ValueError, match=f"^{words}$"):
        PagedModel(model).new_cache(num_blocks=4, dtype=torch.float16)


def test_packed_weights_answer_alike(prompts):
    model = tiny_model("llama-mha")  # its layers have biases
    logits = []
    for settings in ({}, {"pack_weights": True}):
        llm, rows = new_llm(model, **settings), []
        forward = llm.model.forward
        llm.model.forward = lambda *args, f=forward, rows=rows: rows.append(f(*args)) or rows[-1]
        llm.generate(prompts, SamplingParams(max_tokens=1))
        logits.append(torch.cat(rows))
    assert sum(isinstance(layer.forward, partial) for layer in model.modules()) == 7 * 3 + 1
    assert not torch.equal(*logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_packed_weights_give_the_models_own_tokens(prompts):
    model = tiny_model("llama")
    expected = own_answers(model, prompts, 10)
    assert tokens(new_llm(model, pack_weights=True).generate(prompts, GREEDY)) == expected


@pytest.mark.parametrize(
    "wrong", [{"cache_dtype": torch.float16}, {"max_model_len": 10**6}, {"memory": 1}], ids=str
)
def test_a_model_is_packed_last_of_all(model, wrong):
    with pytest.raises(ValueError):
        LLM(model, pack_weights=True, **wrong)
    assert not any(isinstance(layer.forward, partial) for layer in model.modules())


def test_what_cannot_be_packed_is_refused(model, monkeypatch):
    with pytest.raises(ValueError, match="pack_weights: expected linear layers in float32"):
        new_llm(tiny_model("llama").to(torch.float16), pack_weights=True)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    with pytest.raises(ValueError, match="pack_weights: expected a PyTorch with oneDNN"):
        new_llm(tiny_model("llama"), pack_weights=True)


def test_the_models_forward_compiles_in_one_graph_and_soon_not_again(model, prompts, expected):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    llm = new_llm(model)
    llm.model.compile(backend=count)  # what inductor makes of the graph is its own affair
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    seen = len(graphs)
    assert 0 < seen < 8
    others = random_prompts([5, 9, 3, 2, 6])
    assert tokens(llm.generate(others, GREEDY)) == own_answers(model, others, 10)
    assert len(graphs) == seen


def test_what_inductor_makes_of_it_answers_alike(prompts):
    model = tiny_model(
        "llama", num_hidden_layers=2
    )  # the second one's keys begin in the middle of the cache's memory
    answers = tokens(new_llm(model, compile=True).generate(prompts, GREEDY))
    assert answers == own_answers(model, prompts, 10)
