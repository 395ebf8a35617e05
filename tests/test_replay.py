"""Replays: what is read from traces, what the loop promises, and that the figures are those of the manager."""

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from paged_kv.replay.beams import Beams
from paged_kv.replay.driver import replay
from paged_kv.replay.memory import ContiguousMemory, Job, PagedMemory
from paged_kv.replay.run import ModelShape, Options, run
from paged_kv.replay.traces import (
    Piece,
    Request,
    TraceError,
    read_trace,
    synthetic_trace,
    unlimited_hits,
)

TRACES = Path(os.environ.get("PAGED_KV_TRACES", Path(__file__).resolve().parents[1] / "traces"))

MOONCAKE = """\
{"timestamp": 27000, "input_length": 1030, "output_length": 4, "hash_ids": [0, 7, 8]}
{"timestamp": 0, "input_length": 600, "output_length": 30, "hash_ids": [0, 1]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.9799600,3180,8
"""
CONVERSATION = [("human", 40), ("gpt", 80), ("human", 8), ("gpt", 4)]
SHAREGPT = json.dumps(
    [{"conversations": [{"from": who, "value": who[0] * length} for who, length in CONVERSATION]}] * 2
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def requests_of(*lengths: tuple[int, int]) -> list[Request]:
    """Requests of (prompt, answer) tokens, all different."""
    starts = np.cumsum([0, *(sum(pair) for pair in lengths)]).tolist()
    return [
        Request(0.0, (Piece(start, prompt),), Piece(start + prompt, answer))
        for start, (prompt, answer) in zip(starts, lengths, strict=False)
    ]


# Traces


def test_mooncake_ids_stand_for_512_tokens_and_the_last_is_cut(tmp_path):
    first, second = read_trace(written(tmp_path, MOONCAKE))  # in order of arrival
    assert (first.arrival, second.arrival) == (0.0, 27.0)
    tokens = first.prompt_tokens()
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(range(600))
    assert second.prompt_tokens().tolist() == [
        *range(512),
        *range(7 * 512, 8 * 512),
        *range(8 * 512, 8 * 512 + 6),
    ]
    assert first.answer.length == 30
    assert not set(first.answer.tokens().tolist()) & set(second.prompt_tokens().tolist())


def test_azure_prompts_are_their_own(tmp_path):
    first, second = read_trace(written(tmp_path, AZURE))
    assert (first.prompt_len, first.answer.length, first.num_tokens) == (4808, 10, 4817)
    assert second.arrival == pytest.approx(2.0)
    assert not set(first.prompt_tokens().tolist()) & set(second.prompt_tokens().tolist())


def test_times_with_and_without_an_offset_are_compared(tmp_path):
    text = AZURE.replace("05.9799600", "05.979960+00:00").replace(
        "2023-11-16 18:17:05", "2023-11-16T18:17:05"
    )
    assert [request.arrival for request in read_trace(written(tmp_path, text))] == pytest.approx([0.0, 2.0])


def test_hash_ids_may_be_of_any_size(tmp_path):
    first, second = read_trace(written(tmp_path, MOONCAKE.replace(" 7,", f" {2**64 - 1},")))
    assert second.prompt_tokens()[:512].tolist() == first.prompt_tokens()[:512].tolist()
    assert len(second.prompt_tokens()) == 1030


def test_sharegpt_prompts_hold_what_was_said_before(tmp_path):
    requests = read_trace(written(tmp_path, SHAREGPT))
    assert [request.prompt_len for request in requests] == [10, 10, 32, 32]
    once, again, later, _ = requests
    assert once.prompt == again.prompt  # the same words are the same tokens
    assert later.prompt[:2] == (*once.prompt, once.answer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "expected Mooncake JSON lines"),
        ("", "got a file that begins with ''"),
        ("[]", "no request in it"),
        ('[{"conversation": []}]', "no list of ShareGPT conversations: no 'conversations'"),
        ('[{"conversations": [{"from": "gpt", "value": 3}]}]', "no list of ShareGPT conversations"),
        (MOONCAKE + "{}", "line 3 is no Mooncake request: no 'input_length'"),
        (
            MOONCAKE.replace("1030", "2500"),
            "line 1: expected one hash id for every 512 of input_length, got 3 for 2500",
        ),
        (AZURE + "x,1,2", "line 4 is no Azure request: Invalid isoformat string: 'x'"),
        (AZURE.replace("4808", "0"), "line 2: expected ContextTokens of at least 1, got 0"),
        (AZURE.replace(",8", ""), "line 3 is no Azure request"),
        (AZURE + '"' + "a" * 200_000, "field larger than field limit"),
        (
            MOONCAKE.replace("1030", "Infinity"),
            "line 1 is no Mooncake request: cannot convert float infinity",
        ),
        (MOONCAKE.replace("27000", "NaN"), "line 1: expected a timestamp in ms, got nan"),
        (
            SHAREGPT.replace("hh", r"\ud800", 1),
            "no list of ShareGPT conversations: 'utf-8' codec can't encode",
        ),
        ("[" * 100_000, "no list of ShareGPT conversations: maximum recursion depth"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path, text, message):
    with pytest.raises(TraceError) as error:
        read_trace(written(tmp_path, text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_binary_files_are_refused(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(tmp_path / "bytes")


def test_synthetic_requests_are_the_same_for_a_seed_and_share_beginnings():
    requests = synthetic_trace(50, seed=3)
    assert requests == synthetic_trace(50, seed=3) != synthetic_trace(50, seed=4)
    assert len({request.prompt[0] for request in requests}) <= 4
    assert all(a.arrival <= b.arrival for a, b in pairwise(requests))


def test_recorded_traces_where_there_are_some():
    bounds = {"mooncake_conversation.jsonl": 0.2157, "azure_code_2023.csv": 0.0}  # of the first 1000 requests
    for path in (TRACES / file for file in bounds):
        if not path.exists():
            continue
        requests = read_trace(path)
        assert len(requests) == len(path.read_text().splitlines()) - (path.suffix == ".csv")
        total = sum(request.prompt_len for request in requests[:1000])
        assert unlimited_hits(requests[:1000], 16) / total == pytest.approx(bounds[path.name], abs=1e-4)
        figures, _ = run([request.cut(16) for request in requests[:50]], options(num_blocks=16384))
        assert figures["allocators"]["paged"]["waste_mean"] < 0.04
        assert figures["requests"]["finished"] == 50


# The loop


def test_an_unlimited_pool_hits_the_bound():
    requests = synthetic_trace(80)
    memory = PagedMemory(60_000, 16)
    outcome = replay(requests, memory, max_running=1)
    assert outcome.cached_tokens == unlimited_hits(requests, 16) > 0
    assert outcome.prompt_tokens == sum(request.prompt_len for request in requests)
    memory.manager.check()


@pytest.mark.parametrize(("group_size", "beams"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_every_request_that_fits_ends_under_pressure(group_size, beams, prefix_cache):
    requests = requests_of(*[(20 + 7 * i % 50, 30) for i in range(20)], (4000, 5))
    memory = PagedMemory(60, 4, prefix_cache=prefix_cache, group_size=group_size, beams=beams)
    peaks = []
    outcome = replay(requests, memory, on_step=lambda _, running: peaks.append(memory.usage()))
    assert (outcome.finished, outcome.refused) == (20, 1)
    assert outcome.preemptions > 0
    assert all(usage.tokens + usage.waste + usage.cached + usage.free == 240 for usage in peaks)
    assert memory.manager.stats().num_used_blocks == 0
    memory.manager.check()


def test_what_a_preempted_request_finds_again_is_no_hit():
    outcome = replay(requests_of((40, 40), (40, 40)), PagedMemory(32, 4))
    assert outcome.preemptions > 0
    assert outcome.hit_rate == 0.0
    assert outcome.prompt_tokens == 80


def test_decode_writes_the_tokens_of_prompt_and_answer():
    (request,) = requests_of((10, 20))
    memory = PagedMemory(16, 4)
    replay([request], memory)
    job = Job(1, Request(0.0, (*request.prompt, request.answer), Piece(0, 1)))
    assert memory.admit(job) == 28  # all full blocks of the 29 tokens that were computed


def test_requests_come_at_their_time():
    requests = [Request(arrival, (Piece(0, 4),), Piece(9, 5)) for arrival in (0.0, 1.0, 50.0)]
    sizes = []
    replay(
        requests, PagedMemory(64, 4), step_seconds=0.5, on_step=lambda _, running: sizes.append(len(running))
    )
    assert sizes == [1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1]


def test_the_batch_is_limited_and_told():
    outcome = replay(requests_of(*[(8, 8)] * 6), PagedMemory(64, 4), max_running=2)
    assert (outcome.largest_batch, outcome.sustained_batch) == (2, 2.0)


# What it is compared with


def test_contiguous_memory_reserves_a_whole_life():
    requests = requests_of((8, 9), (8, 9), (8, 9))
    memory = ContiguousMemory(40, lambda request: request.num_tokens)
    usages = []
    outcome = replay(requests, memory, on_step=lambda _, running: usages.append(memory.usage()))
    assert outcome.largest_batch == 2
    assert usages[0] == (16, 16, 0, 8, 0, 2)
    assert memory.usage().free == 40


def test_beams_never_cost_more_than_the_costliest_offer_and_stay_within_their_request():
    beams = Beams(4)
    for _ in range(20):
        parents = np.array(beams.choose([5, 9])).reshape(2, 4)
        assert (parents[0] < 4).all()
        assert (parents[1] >= 4).all()
    beams.forget(5)
    assert set(beams.choose([5])) == {0}  # only one of equal beams makes offers


# Figures


def options(**changes) -> Options:
    return Options(**{"name": "t", "num_blocks": 512, "shape": ModelShape(2, 1, 8, "float32")} | changes)


def test_figures_are_those_of_the_run_and_can_be_json():
    requests = [request.cut(20) for request in synthetic_trace(40)]
    figures, runs = run(requests, options())
    assert json.loads(json.dumps(figures)) == figures
    paged, power, longest = figures["allocators"].values()
    assert 0 < paged["waste_mean"] <= paged["waste_p99"] <= paged["waste_worst"] < power["waste_mean"]
    assert power["waste_mean"] < longest["waste_mean"]
    assert paged["sustained_batch"] > power["sustained_batch"] > longest["sustained_batch"]
    assert figures["pool"]["bytes"] == 512 * 16 * 2 * 2 * 8 * 4
    assert figures["prefix_cache"]["hit_rate"] <= figures["prefix_cache"]["unlimited_hit_rate"]
    assert figures["requests"]["finished"] == 40
    times, num_blocks = runs[0].memory.times, runs[0].memory.num_prompt_blocks
    assert figures["manager_time_us"]["per_prompt_block"] == pytest.approx(
        1e6 * (times.prompt + times.release) / num_blocks
    )
    assert len(runs[0].timeline) == paged["steps"]


@pytest.mark.parametrize("beams", [False, True])
def test_samples_and_beams_share_their_prompt(beams):
    """The paper's figures (Kwon et al., 2023) are 6-30 % for samples, 37-66 % for beams."""
    figures, _ = run(requests_of((512, 128)), options(group_size=4, beams=beams))
    saved = figures["sharing"]["memory_saved_mean"]
    # Of 4 x 36 blocks on average, three times the prompt's 32 are saved, and with beams most of the answers'.
    assert 0.6 < saved < 0.75
    assert figures["sharing"]["copied_blocks"] > 3 if beams else figures["sharing"]["copied_blocks"] == 0
