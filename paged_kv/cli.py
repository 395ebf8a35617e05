"""`paged-kv`, or `python -m paged_kv`: answer prompts from the command line, tell what was built.

Answers go to stdout, everything else to stderr. Exit codes: 0 when all is well, 2 for input that cannot be
used (one line says why), 1 where output cannot be written, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, redirect_stderr
from dataclasses import fields
from pathlib import Path
from typing import NoReturn, TextIO

import torch

from .build_info import build_info
from .engine import LLM, RequestOutput, SamplingParams, StepTrace
from .engine.llm import check_options
from .errors import UnsupportedModelError
from .integrations.loading import default_model
from .replay.command import add_arguments as add_replay_arguments
from .replay.command import replay_command
from .replay.traces import TraceError

__all__ = ["main"]

FEW = 8
"""Up to so many prompts, answers are printed token by token; more get a progress bar."""

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
CACHE_DTYPES = {name: getattr(torch, name) for name in ("int8", "float8_e4m3fn", "float8_e5m2")}


class InputError(Exception):
    """What the user gave cannot be used; the message is the one line they see."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (None: the process's own) and returns its exit code."""
    try:
        args = _parse(argv)
        code = args.run(args)
        sys.stdout.flush()  # what cannot be written is to be told here, not at exit
        return code
    except InputError as error:
        print(f"paged-kv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npaged-kv: interrupted", file=sys.stderr)
        return 130
    except MemoryError as error:
        print(f"paged-kv: {str(error) or 'there is not so much memory'}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        _discard_stdout()
        return 141
    except OSError as error:
        print(f"paged-kv: cannot write: {error.strerror}", file=sys.stderr)
        _discard_stdout()
        return 1


def _discard_stdout() -> None:
    """What is still buffered for stdout has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="paged-kv", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="print versions, compiler and instruction sets")
    info.set_defaults(run=_info)

    generate = commands.add_parser(
        "generate",
        help="answer prompts with a model whose keys and values live in blocks",
        description="Answers prompts given as arguments, in a file, or on stdin (one a line).",
    )
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("prompts", nargs="*", metavar="PROMPT")
    add("--file", metavar="FILE", help="read prompts from FILE, one a line; - for stdin")
    add(
        "--model",
        type=Path,
        metavar="PATH",
        help="model folder or GGUF file (default: SmolLM2-135M-Instruct)",
    )
    add("--raw", action="store_true", help="continue the prompts as they are, without the chat template")
    add("--output", type=Path, metavar="FILE", help="write answers to FILE as JSON lines instead of stdout")
    add("--max-tokens", type=int, default=128, metavar="N", help="new tokens per answer (default: 128)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be given repeatedly")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens only")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest share P only")
    add("--seed", type=int, metavar="S", help="same seed, same answers")
    add("--n", type=int, default=1, metavar="N", help="answers to each prompt (default: 1)")
    add("--best-of", type=int, metavar="N", help="draw N samples, and tell the --n likeliest")
    add("--beam-width", type=int, metavar="W", help="search with W beams, and tell the --n best")
    add("--length-penalty", type=float, default=1.0, metavar="L", help="of beams: more favours longer ones")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1 for fewer repetitions")
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="P",
        help="taken off the logits of tokens that the answer has",
    )
    add(
        "--draft-tokens",
        type=int,
        default=0,
        metavar="N",
        help="verify up to N guesses a step, from what followed the same words",
    )
    add("--logprobs", type=int, metavar="K", help="with --output: each token's, and of the K likeliest")
    add("--dtype", choices=DTYPES, help="of the weights (default: as stored; float32 for GGUF)")
    add("--cache-dtype", choices=CACHE_DTYPES, help="quantise keys and values (default: the weights' dtype)")
    add("--pack-weights", action="store_true", help="float32 on a CPU: faster decode, for twice the memory")
    add("--block-size", type=int, default=16, metavar="B", help="token slots in a block (default: 16)")
    add("--num-blocks", type=int, metavar="N", help="blocks in the pool (default: 1 GiB of them)")
    add(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="most answers and beams computed at once (default: 64)",
    )
    add("--stats", action="store_true", help="print latencies, cache hits and preemptions at the end")
    add("--trace", type=Path, metavar="FILE", help="write a Chrome trace of the steps, for ui.perfetto.dev")

    replay = commands.add_parser(
        "replay",
        help="serve a trace of requests with the block manager and tell waste, sharing and hit rate",
        description="Replays a trace through the block manager. No model is computed and no tensor is touched.",
    )
    replay.set_defaults(run=_replay)
    add_replay_arguments(replay)
    return parser.parse_args(argv)


def _info(args: argparse.Namespace) -> int:
    print(build_info())
    return 0


def _replay(args: argparse.Namespace) -> int:
    try:
        return replay_command(args)
    except (TraceError, ImportError) as error:
        raise InputError(str(error)) from None


def _generate(args: argparse.Namespace) -> int:
    params, options = _sampling_params(args), _llm_options(args)
    prompts = _read_prompts(args)
    with _open_output(args.output) as output, _open_output(args.trace) as trace:
        llm = _load(args, options)
        llm.engine.trace = StepTrace() if trace else None
        chat = bool(llm.tokenizer.chat_template) and not args.raw
        ids = [llm.encode(prompt, chat=chat) for prompt in prompts]
        started = time.perf_counter()
        try:
            # Closed, so that nothing goes on when an answer cannot be written.
            with closing(llm.stream(ids, params)) as outputs:
                if output is None and len(prompts) <= FEW:
                    finished = _show(outputs, prompts)
                else:
                    finished = _collect(outputs, prompts, output)
        finally:
            if trace:
                llm.engine.trace.write(trace)
        seconds = time.perf_counter() - started
    refused = [answer for answer in finished if answer.error]
    for answer in refused:
        print(f"paged-kv: prompt {answer.index + 1}: {answer.error}", file=sys.stderr)
    if len(refused) < len(finished):
        _print_summary(llm, finished, seconds)
    if args.stats:
        print(llm.metrics, file=sys.stderr)
    return 2 if refused else 0


# Input


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts and args.file:
        raise InputError("prompts were given both as arguments and with --file")
    if args.prompts:
        prompts, source = args.prompts, "the arguments"
    elif args.file and args.file != "-":
        prompts, source = _read_lines(Path(args.file)), args.file
    elif args.file or not sys.stdin.isatty():
        prompts, source = _read_lines(None), "stdin"
    else:
        raise InputError("no prompt: give one as an argument, in a --file, or on stdin")
    if not prompts:
        raise InputError(f"no prompt in {source}")
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise InputError(f"prompt {number} is empty")
        if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError(f"prompt {number} is not UTF-8 text")  # Python hands such bytes on as surrogates
    return prompts


def _read_lines(path: Path | None) -> list[str]:
    name = path or "stdin"
    try:
        text = path.read_text(encoding="utf-8") if path else sys.stdin.read()
    except UnicodeDecodeError:
        raise InputError(f"cannot read {name}: it is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    return [line for line in text.splitlines() if line.strip()]


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    if args.logprobs is not None and args.output is None:
        raise InputError("argument --logprobs: expected an --output, since only JSON lines tell them")
    names = {field.name for field in fields(SamplingParams)}
    try:
        params = SamplingParams(**{name: value for name, value in vars(args).items() if name in names})
    except ValueError as error:
        raise InputError(f"argument {_in_options(str(error), args)}") from None
    if params.num_seqs > args.max_num_seqs >= 1:
        name = next(name for name in ("beam_width", "best_of", "n") if getattr(args, name))
        raise InputError(
            f"argument {_option(name)}: expected at most the {args.max_num_seqs} of --max-num-seqs, "
            f"got {params.num_seqs}"
        )
    return params


def _llm_options(args: argparse.Namespace) -> dict[str, object]:
    options = {
        "dtype": DTYPES.get(args.dtype),
        "pack_weights": args.pack_weights,
        "block_size": args.block_size,
        "num_blocks": args.num_blocks,
        "max_num_seqs": args.max_num_seqs,
    }
    try:
        check_options(**options)
    except ValueError as error:
        raise InputError(f"argument {_in_options(str(error), args)}") from None
    return options | {"cache_dtype": CACHE_DTYPES.get(args.cache_dtype)}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _in_options(message: str, args: argparse.Namespace) -> str:
    """The message with `--draft-tokens` where it says `draft_tokens`; short names are only sure at its beginning."""
    for name in vars(args):
        where = rf"\b{name}\b" if "_" in name else rf"\A{name}(?=:)|(?<=since ){name}(?= is)"
        message = re.sub(where, _option(name), message)
    return message


def _open_output(path: Path | None) -> TextIO | nullcontext:
    if path is None:
        return nullcontext()
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _load(args: argparse.Namespace, options: dict[str, object]) -> LLM:
    try:
        path = args.model or default_model()
        if sys.stderr.isatty():
            print(f"loading {path.name}", file=sys.stderr)
        with redirect_stderr(io.StringIO()):  # transformers' progress bars; its warnings still come through
            return LLM(path, **options)
    except (FileNotFoundError, ImportError, UnsupportedModelError) as error:
        raise InputError(str(error)) from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot use {path}: {_in_options(first_line, args)}") from None


# Output


class _Transcript:
    """Prints answers in the order of the prompts, the first unfinished one as it grows."""

    def __init__(self, prompts: list[str]) -> None:
        self._prompts = prompts
        self._latest: dict[int, RequestOutput] = {}
        self._prompt = self._answer = 0  # what is being printed: this answer to this prompt
        self._shown = -1  # characters of it; -1 before its heading

    def add(self, output: RequestOutput) -> None:
        self._latest[output.index] = output
        while latest := self._latest.get(self._prompt):
            for answer in latest.completions[self._answer :]:
                if self._shown < 0:
                    self._print(_heading(latest, self._answer, self._prompts))
                    self._shown = 0
                self._print(answer.text[self._shown :])
                self._shown = len(answer.text)
                if answer.finish_reason is None:
                    return
                self._print("\n")
                self._answer, self._shown = self._answer + 1, -1
            if not latest.finished:
                return
            self._prompt, self._answer = self._prompt + 1, 0

    @staticmethod
    def _print(text: str) -> None:
        print(text, end="", flush=True)


def _heading(output: RequestOutput, answer: int, prompts: list[str]) -> str:
    """What stands before an answer: its prompt where there are several, and its number likewise."""
    heading = ""
    if len(prompts) > 1 and not answer:
        gap = "\n" if output.index else ""
        heading = f"{gap}[{output.index + 1}/{len(prompts)}] {prompts[output.index].strip()}\n"
    num_answers = len(output.completions)
    return heading if num_answers == 1 else f"{heading}({answer + 1}/{num_answers}) "


def _show(outputs: Iterator[RequestOutput], prompts: list[str]) -> list[RequestOutput]:
    """Prints a few answers token by token."""
    transcript, finished = _Transcript(prompts), []
    for output in outputs:
        transcript.add(output)
        if output.finished:
            finished.append(output)
    return finished


def _collect(
    outputs: Iterator[RequestOutput], prompts: list[str], file: TextIO | None
) -> list[RequestOutput]:
    """Prints many answers, or writes them to `file`, in the order of the prompts, under a progress bar."""
    from tqdm import tqdm

    finished: dict[int, RequestOutput] = {}
    num_written = num_outputs = 0
    with tqdm(total=len(prompts), unit=" prompts", disable=not sys.stderr.isatty()) as bar:
        for output in outputs:
            num_outputs += 1
            bar.set_postfix({"outputs": num_outputs}, refresh=False)
            if output.finished:
                bar.update()
                finished[output.index] = output
            while latest := finished.get(num_written):
                for place, answer in enumerate(latest.completions):
                    if file is None:
                        tqdm.write(_heading(latest, place, prompts) + answer.text, file=sys.stdout)
                    else:
                        file.write(json.dumps(_record(latest, place, prompts), ensure_ascii=False) + "\n")
                num_written += 1
    return list(finished.values())


def _record(output: RequestOutput, place: int, prompts: list[str]) -> dict[str, object]:
    """The JSON line of one answer: `place` counts those to its prompt, the best first where they were compared."""
    answer = output.completions[place]
    record = {
        "index": output.index,
        "completion": place,
        "prompt": prompts[output.index],
        "text": answer.text,
        "token_ids": answer.token_ids,
        "num_prompt_tokens": len(output.prompt_ids),
        "finish_reason": answer.finish_reason.value,
        "error": output.error,
    }
    if answer.score is not None:
        record["score"] = answer.score
    if answer.logprobs:
        record["logprobs"] = answer.logprobs
    return record


def _print_summary(llm: LLM, answers: list[RequestOutput], seconds: float) -> None:
    num_prompt = sum(len(answer.prompt_ids) for answer in answers if not answer.error)
    num_new = sum(len(one.token_ids) for answer in answers for one in answer.completions)
    preemptions = llm.engine.num_preemptions
    print(
        f"\nprompts: {len(answers)}, of {num_prompt} tokens; {num_new} new tokens in {seconds:.1f} s, "
        f"{num_new / seconds:.1f} a second; preemptions: {preemptions}\n{llm.cache_use}",
        file=sys.stderr,
    )
