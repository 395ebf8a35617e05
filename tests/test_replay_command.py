"""`paged-kv replay` as users meet it."""

import json
import sys

import pytest

from paged_kv.cli import main
from paged_kv.replay.driver import Outcome

TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 30, "hash_ids": [0, 1]}\n' * 6
SMALL = ["--num-blocks", "256", "--layers", "2", "--dtype", "float16"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(TRACE)
    return str(path)


def test_the_table_names_what_it_is_about(trace, capsys):
    assert main(["replay", trace, *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mooncake.jsonl: 6 requests of 3,600 prompt tokens, 180 new tokens\n")
    assert "pool: 256 blocks of 16 slots, 32.0 MiB (2 layers, 8 kv heads, head size 128, float16)" in out
    for label in ("waste, mean", "largest batch", "prefix cache hits", "memory saved by sharing", "runs of"):
        assert label in out


def test_json_is_nothing_but_json(trace, capsys):
    assert main(["replay", trace, *SMALL, "--json", "--samples", "2", "--max-output", "9"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["requests"] == {
        "finished": 6,
        "refused": 0,
        "prompt_tokens": 3600,
        "new_tokens": 6 * 2 * 9,
        "sequences_each": 2,
        "beam_search": False,
    }
    assert figures["prefix_cache"]["hit_rate"] == pytest.approx(5 * 592 / 3600)


def test_without_a_trace_requests_are_made_up(capsys):
    assert main(["replay", "--requests", "12", "--memory", "2GiB", "--beam-width", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["pool"]["num_blocks"] == 1024
    assert figures["requests"]["finished"] == 12
    assert figures["requests"]["beam_search"]


def test_options_reach_the_manager(trace, capsys):
    options = [
        "--no-prefix-cache",
        "--block-size",
        "8",
        "--max-running",
        "1",
        "--step-ms",
        "5",
        "--requests",
        "2",
    ]
    assert main(["replay", trace, *SMALL, *options, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert not figures["prefix_cache"]["enabled"]
    assert figures["prefix_cache"]["hit_rate"] == 0.0
    assert figures["pool"]["block_size"] == 8
    assert figures["allocators"]["paged"]["largest_batch"] == 1
    assert figures["requests"]["finished"] == 2


@pytest.mark.parametrize("arguments", [[], ["--samples", "3"], ["--num-blocks", "40"]])
def test_a_picture_is_drawn(trace, tmp_path, capsys, arguments):
    path = tmp_path / "picture.png"
    assert main(["replay", trace, "--num-blocks", "256", *arguments, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == f"drawn to {path}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "cannot read none.jsonl: No such file or directory"),
        (["."], "cannot read .: Is a directory"),
        (
            ["{trace}", "--block-size", "0"],
            "argument --block-size: expected an integer from 1 to 2147483647, got '0'",
        ),
        (
            ["{trace}", "--memory", "lots"],
            "argument --memory: expected bytes, as 512MiB or 40GiB, got 'lots'",
        ),
        (
            ["{trace}", "--memory", "1KiB"],
            "argument --memory: expected at least the 2097152 bytes of one block",
        ),
        (["{trace}", "--memory", "1GiB", "--num-blocks", "4"], "not allowed with argument"),
        (["{trace}", "--samples", "2", "--beam-width", "2"], "not allowed with argument"),
        (["{trace}", "--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
        (
            ["{trace}", "--step-ms", "-1"],
            "argument --step-ms: expected a finite number of at least 0, got -1.0",
        ),
        (
            ["{trace}", "--step-ms", "nan"],
            "argument --step-ms: expected a finite number of at least 0, got nan",
        ),
        (
            ["{trace}", "--memory", "9" * 400],
            "argument --memory: expected bytes, as 512MiB or 40GiB, got '999",
        ),
        (
            ["{trace}", "--num-blocks", "9" * 17],
            "argument --num-blocks: expected an integer from 1 to 2147483647, got '99999999999999999'",
        ),
        (
            ["{trace}", "--memory", "9" * 17],
            "argument --memory: expected at most 2147483647 times the 2097152 bytes of one block",
        ),
        (
            ["{trace}", "--num-blocks", "4"],
            "no request fits the pool of 4 blocks of 16 slots: the smallest needs 40",
        ),
        (["{trace}", "--plot", "picture.docx"], "argument --plot: expected a file name that ends in .png"),
        (["{trace}", "--plot", "nowhere/picture.png"], "argument --plot: no folder"),
    ],
)
def test_what_cannot_be_used_gives_one_line_and_exit_code_2(trace, capsys, arguments, message):
    assert main(["replay", *(argument.format(trace=trace) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("paged-kv: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_without_matplotlib_the_extra_is_named_before_anything_is_replayed(trace, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "paged_kv.replay.plot", raising=False)
    monkeypatch.delattr("paged_kv.replay.plot", raising=False)
    monkeypatch.setattr("paged_kv.replay.run.replay", lambda *args, **kwargs: pytest.fail("replayed"))
    assert main(["replay", trace, "--plot", "picture.png"]) == 2
    assert "pip install 'paged_kv[plot]'" in capsys.readouterr().err


def test_outcome_of_nothing_has_rates_of_zero():
    assert (Outcome().hit_rate, Outcome().sustained_batch) == (0.0, 0.0)
