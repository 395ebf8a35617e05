"""The picture of a replay: what the memory was used for over time, and who holds which block of the pool.

Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .._optional import optional_import
from .run import Options, PoolMap, Run
from .traces import TraceError

matplotlib = optional_import("matplotlib", "plot")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

KINDS = {  # from the bottom of the stack upwards: (legend, colour)
    "tokens": ("tokens of running sequences", "#2b6cb0"),
    "waste": ("waste: allocated, no token", "#e53e3e"),
    "cached": ("prefix cache, evictable", "#a3cfbb"),
    "free": ("free", "#f1f3f5"),
}
CACHED, FREE = KINDS["cached"][1], KINDS["free"][1]
SHARED = {2: "#8a8f98", 3: "#4b5058", 9: "#111111"}  # by the least number of holders
POINTS = 1500  # of a curve: steps beyond that are averaged


def check_target(path: Path) -> None:
    """Raises TraceError where matplotlib could not save a picture to `path`."""
    formats = pyplot.figure().canvas.get_supported_filetypes()
    pyplot.close("all")
    if path.suffix[1:].lower() not in formats:
        raise TraceError(f"argument --plot: expected a file name that ends in .png or the like, got {path}")
    if not path.absolute().parent.is_dir():
        raise TraceError(f"argument --plot: no folder {path.absolute().parent}")


def draw(path: Path, options: Options, runs: list[Run]) -> None:
    """Saves the picture of `runs`, the first of which is the paged one and has a map of the pool."""
    figure = pyplot.figure(figsize=(16, 10.5), layout="constrained")
    grid = figure.add_gridspec(2, len(runs), height_ratios=(1, 1.25))
    title = f"{options.name}: {options.num_blocks:,} blocks of {options.block_size} slots"
    figure.suptitle(title, x=0.01, y=0.985, ha="left", fontsize=15)
    first = None
    for place, run in enumerate(runs):
        axes = figure.add_subplot(grid[0, place], sharey=first)
        first = first or axes
        _draw_use(axes, run, options)
    patches = [Patch(facecolor=colour, edgecolor="#adb5bd", label=label) for label, colour in KINDS.values()]
    figure.legend(handles=patches, loc="outside upper right", ncols=2, frameon=False)
    first.set_ylabel(f"slots (all: {_gib(options)})")
    if runs[0].half_way is not None:
        _draw_map(figure.add_subplot(grid[1, :]), runs[0].half_way, options)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _gib(options: Options) -> str:
    return f"{options.num_blocks * options.bytes_per_block / 2**30:.1f} GiB"


def _draw_use(axes: Axes, run: Run, options: Options) -> None:
    steps = np.arange(len(run.timeline))
    total = options.num_blocks * options.block_size
    if len(steps):
        columns = [_averaged(run.timeline.column(kind)) for kind in KINDS]
        axes.stackplot(
            _averaged(steps), *columns, colors=[colour for _, colour in KINDS.values()], linewidth=0
        )
        axes.set_xlim(0, max(1, len(steps) - 1))
    axes.set_ylim(0, total)
    axes.margins(0)
    waste = run.timeline.waste()
    mean = f"waste {waste.mean():.1%}" if len(waste) else "nothing fits"
    axes.set_title(
        f"{run.name}\n{mean}, {run.outcome.sustained_batch:.0f} requests at once, {len(steps):,} steps",
        fontsize=11,
    )
    axes.set_xlabel("step")
    thousands = total >= 20_000
    axes.yaxis.set_major_formatter(lambda v, _: f"{v / 1000:,.0f}k" if thousands else f"{v:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _averaged(values: np.ndarray) -> np.ndarray:
    """At most POINTS means of neighbouring values."""
    if len(values) <= POINTS:
        return values
    edges = np.linspace(0, len(values), POINTS + 1).astype(int)[:-1]
    return np.add.reduceat(values, edges) / np.diff([*edges, len(values)])


def _draw_map(axes: Axes, pool: PoolMap, options: Options) -> None:
    """One cell a block, in order of ids row by row; neighbours of one request are one strip of its colour."""
    num_blocks = len(pool.owner)
    columns = int(np.ceil(np.sqrt(num_blocks * 4.2) / 16) * 16)
    rows = -(-num_blocks // columns)
    requests, colour_of = np.unique(pool.owner[pool.owner >= 0], return_inverse=True)
    colours = _request_colours(len(requests))
    palette = [CACHED, FREE, *SHARED.values(), *colours]
    cells = np.where(pool.owner == -1, 0, 1)
    cells[pool.owner >= 0] = len(palette) - len(colours) + colour_of
    for colour, least in enumerate(SHARED, 2):
        cells[pool.holders >= least] = colour
    image = np.full(rows * columns, -1)
    image[:num_blocks] = cells
    masked = np.ma.masked_less(image.reshape(rows, columns), 0)
    axes.imshow(
        masked,
        cmap=ListedColormap(palette),
        vmin=-0.5,
        vmax=len(palette) - 0.5,
        aspect="auto",
        interpolation="nearest",
    )
    shared = int(np.count_nonzero(pool.holders > 1))
    axes.set_title(
        f"the pool half-way, step {pool.step:,}: {len(requests):,} requests, a colour each; "
        f"{shared:,} blocks shared; {columns} blocks a row",
        fontsize=11,
    )
    axes.set_yticks(np.arange(0, rows, max(1, rows // 6)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{int(value) * columns:,}")
    axes.set_ylabel("block id at the row's beginning")
    axes.set_xticks([])
    held_by_one = colours[len(colours) // 2] if len(colours) else FREE
    labels = (
        (held_by_one, "one holder, in its request's colour"),
        *zip(SHARED.values(), ("2 holders", "3 to 8", "9 or more"), strict=True),
        (CACHED, "cached, evictable"),
        (FREE, "free"),
    )
    axes.legend(
        handles=[Patch(facecolor=colour, edgecolor="#adb5bd", label=label) for colour, label in labels],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.01),
        ncols=len(labels),
        frameon=False,
    )


def _request_colours(count: int) -> list[tuple[float, ...]]:
    """Colours of which neighbours differ: hues a golden section apart, in three strengths."""
    hues = (np.arange(count) * 0.618034) % 1.0
    strengths = np.resize([0.55, 0.75, 0.4], count)
    values = np.resize([0.9, 0.75, 0.98], count)
    return [tuple(rgb) for rgb in matplotlib.colors.hsv_to_rgb(np.stack([hues, strengths, values], axis=1))]
