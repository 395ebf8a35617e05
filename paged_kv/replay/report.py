"""The figures of a replay, as plain data and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from .driver import Outcome
from .timeline import Timeline

if TYPE_CHECKING:
    from .run import Options, Run

Figures = dict[str, object]

MIB = 2**20


def figures(options: Options, runs: list[Run], hit_rate_bound: float) -> Figures:
    """What a replay found, ready for JSON: shares are between 0 and 1, times in microseconds, sizes in bytes."""
    paged = runs[0]
    memory, outcome = paged.memory, paged.outcome
    decode_seconds = sum(seconds for seconds, _ in memory.times.decode)
    saved = paged.timeline.saved()
    return {
        "trace": options.name,
        "requests": {
            "finished": outcome.finished,
            "refused": outcome.refused,
            "prompt_tokens": outcome.prompt_tokens,
            "new_tokens": outcome.new_tokens * options.group_size,
            "sequences_each": options.group_size,
            "beam_search": options.beams,
        },
        "pool": {
            "num_blocks": options.num_blocks,
            "block_size": options.block_size,
            "bytes": options.num_blocks * options.bytes_per_block,
            "model": str(options.shape),
        },
        "allocators": {run.name: _use(run.outcome, run.timeline) for run in runs},
        "batch_ratio": {
            run.name: _ratio(outcome.sustained_batch, run.outcome.sustained_batch) for run in runs[1:]
        },
        "prefix_cache": {
            "enabled": options.prefix_cache,
            "hit_rate": outcome.hit_rate,
            "unlimited_hit_rate": hit_rate_bound,
        },
        "sharing": {
            "most_shared_blocks": memory.most_shared_blocks,
            "memory_saved_mean": _mean(saved),
            "memory_saved_most": float(saved.max(initial=0.0)),
            "copied_blocks": memory.manager.stats().counters.copied,
        },
        "preemptions": outcome.preemptions,
        "mean_neighbour_run": _ratio(memory.num_table_entries, memory.num_runs),
        "manager_time_us": {
            "per_request": _ratio(
                1e6 * (memory.times.prompt + memory.times.release + decode_seconds), outcome.finished
            ),
            "per_prompt_block": _micro(memory.times.per_prompt_block(memory.num_prompt_blocks)),
            "per_decode_slot": _micro(memory.times.per_slot),
            "per_decode_step": _micro(
                median(s for s, _ in memory.times.decode) if memory.times.decode else None
            ),
            "all": 1e6 * (memory.times.prompt + memory.times.release + decode_seconds),
        },
    }


def _use(outcome: Outcome, timeline: Timeline) -> Figures:
    waste = timeline.waste()
    return {
        "waste_mean": _mean(waste),
        "waste_p99": float(np.percentile(waste, 99)) if len(waste) else 0.0,
        "waste_worst": float(waste.max(initial=0.0)),
        "sustained_batch": outcome.sustained_batch,
        "largest_batch": outcome.largest_batch,
        "steps": outcome.steps,
        "refused": outcome.refused,
    }


def _mean(values: np.ndarray) -> float:
    return fmean(values) if len(values) else 0.0


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


@dataclass(frozen=True)
class _Row:
    label: str
    cells: tuple[str, ...]


def table(f: Figures) -> str:
    """The figures for people."""
    requests, pool, cache, sharing = f["requests"], f["pool"], f["prefix_cache"], f["sharing"]
    each = ""
    if requests["sequences_each"] > 1:
        kind = "beams" if requests["beam_search"] else "samples"
        each = f", {requests['sequences_each']} {kind} each"
    title = (
        f"{f['trace']}: {requests['finished']:,} requests of {requests['prompt_tokens']:,} prompt tokens, "
        f"{requests['new_tokens']:,} new tokens{each}\n"
        f"pool: {pool['num_blocks']:,} blocks of {pool['block_size']} slots, {_size(pool['bytes'])} "
        f"({pool['model']})"
    )
    allocators = f["allocators"]
    uses = list(allocators.values())
    compared = [
        _Row("", tuple(allocators)),
        _Row("waste, mean", tuple(_share(use["waste_mean"]) for use in uses)),
        _Row("waste, 99th percentile", tuple(_share(use["waste_p99"]) for use in uses)),
        _Row("waste, worst", tuple(_share(use["waste_worst"]) for use in uses)),
        _Row("batch while others wait", tuple(f"{use['sustained_batch']:.1f}" for use in uses)),
        _Row("largest batch", tuple(f"{use['largest_batch']:,}" for use in uses)),
        _Row("paged batch is larger", ("", *(_times(ratio) for ratio in f["batch_ratio"].values()))),
        _Row("steps", tuple(f"{use['steps']:,}" for use in uses)),
        _Row("requests that never fit", tuple(f"{use['refused']:,}" for use in uses)),
    ]
    if cache["enabled"]:
        hits = f"{_share(cache['hit_rate'])} of prompt tokens ({_share(cache['unlimited_hit_rate'])} if unlimited)"
    else:
        hits = f"off ({_share(cache['unlimited_hit_rate'])} of prompt tokens if on and unlimited)"
    times = f["manager_time_us"]
    single = [
        _Row("prefix cache hits", (hits,)),
        _Row(
            "blocks shared",
            (f"{sharing['most_shared_blocks']:,} at most, {sharing['copied_blocks']:,} copied",),
        ),
        _Row(
            "memory saved by sharing",
            (f"{_share(sharing['memory_saved_mean'])} mean, {_share(sharing['memory_saved_most'])} at most",),
        ),
        _Row("preemptions", (f"{f['preemptions']:,}",)),
        _Row("runs of neighbours", (f"{_number(f['mean_neighbour_run'])} blocks long (mean)",)),
        _Row(
            "manager's time",
            (
                f"{_number(times['per_request'])} us a request, {_number(times['per_prompt_block'])} us a prompt "
                f"block, {_number(times['per_decode_slot'])} us a decode slot",
            ),
        ),
    ]
    return f"{title}\n\n{_aligned(compared)}\n\n{_aligned(single)}"


def _aligned(rows: list[_Row]) -> str:
    label = max(len(row.label) for row in rows)
    if len(rows[0].cells) == 1:
        return "\n".join(f"{row.label:<{label}}  {row.cells[0]}" for row in rows)
    widths = [max(len(row.cells[i]) for row in rows) for i in range(len(rows[0].cells))]
    return "\n".join(
        f"{row.label:<{label}}" + "".join(f"   {c:>{w}}" for c, w in zip(row.cells, widths, strict=True))
        for row in rows
    )


def _share(share: float) -> str:
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def _times(ratio: float | None) -> str:
    return f"{ratio:.1f} times" if ratio else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / MIB:.1f} MiB"
