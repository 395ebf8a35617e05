"""The benchmark over the block manager's own tables: what it is run on, which is all of it but the timing."""

from pathlib import Path

import pytest
import torch

from bench.attention import ROUNDS, Bench, Entry
from bench.attention_cases import Group, Inputs, Ours, Shape, check
from bench.attention_tables import PLACEMENTS, Moment, moment_of, neighbours
from bench.common import PlainRead
from paged_kv.replay.traces import Piece, Request

SYSTEM = Piece(0, 40)  # with which every request begins: two blocks of 16, and half of a third
POOL, BLOCK_SIZE = 64, 16


def requests_of(count: int) -> list[Request]:
    pieces = [Piece(1000 * index, 30 + 37 * index % 200) for index in range(1, count + 1)]
    return [
        Request(0.0, (SYSTEM, piece), Piece(10**6 + 1000 * index, 5 + index % 9))
        for index, piece in enumerate(pieces)
    ]


@pytest.fixture(scope="module")
def moment() -> Moment:
    return moment_of(requests_of(80), POOL, BLOCK_SIZE)


def test_a_moment_has_the_running_sequences(moment):
    assert moment.num_finished >= 40
    assert len(moment.tables) == len(moment.seq_lens) > 1
    for table, length in zip(moment.tables, moment.seq_lens, strict=True):
        assert len(table) == -(-length // BLOCK_SIZE)
        assert table.tolist() == sorted(set(table.tolist()), key=table.tolist().index)  # each block once
        assert table.min() >= 0
        assert table.max() < POOL


def test_a_moment_keeps_what_is_shared(moment):
    first = moment.tables[0][:2].tolist()
    assert all(table[:2].tolist() == first for table in moment.tables)  # SYSTEM's full blocks
    assert moment.num_entries - moment.num_distinct == 2 * (len(moment.tables) - 1)


def test_no_running_sequence_is_an_error():
    with pytest.raises(
        ValueError, match="expected a sequence that runs after half of 3 requests in 2 blocks"
    ):
        moment_of(requests_of(3), 2, BLOCK_SIZE)  # none of them ever fits


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_moves_blocks_and_changes_no_table(moment, name):
    order = PLACEMENTS[name](moment)
    assert sorted(order.tolist()) == list(range(POOL))
    back = order.argsort()
    for table, placed in zip(moment.tables, moment.placed(order), strict=True):
        assert back[placed].tolist() == table.tolist()


def test_only_runs_lie_in_runs(moment):
    shares = {name: neighbours(moment.placed(order(moment))) for name, order in PLACEMENTS.items()}
    jumps = len(moment.tables) - 1  # from the shared blocks to a sequence's own, once in each but the first
    assert shares["runs"] == pytest.approx(1 - jumps / (moment.num_entries - len(moment.tables)))
    assert shares["scattered"] < shares["manager"] <= shares["runs"]


def test_neighbours_are_counted_within_tables():
    assert neighbours([torch.tensor([3, 4, 5, 9]), torch.tensor([10])]) == 2 / 3
    assert neighbours([torch.tensor([3]), torch.tensor([4])]) == 0


@pytest.mark.parametrize("layout", ["HND", "head_major"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_decode_over_the_tables_is_right(moment, name, layout):
    shape = moment.shape(name, layout)
    assert [length for _, length in shape.lens] == moment.seq_lens
    inputs = Inputs(shape, moment.placed(PLACEMENTS[name](moment)), POOL)
    for keys in inputs.keys[1:]:
        assert keys[:32].equal(inputs.keys[0][:32])  # of the shared blocks
    ours = Ours(inputs)
    check(name, inputs, ours())
    middle = sorted(range(len(moment.seq_lens)), key=moment.seq_lens.__getitem__)[len(moment.seq_lens) // 2]
    inputs.values[middle].add_(1)
    with pytest.raises(SystemExit, match=f"decode {len(moment.tables)} x .* {name} is wrong"):
        check(name, inputs, ours.out)


def test_the_limit_reads_every_block_that_a_table_names(moment):
    blocks = torch.cat(moment.placed(PLACEMENTS["manager"](moment)))
    caches = list(torch.zeros(2, POOL, 8, BLOCK_SIZE, 128, dtype=torch.bfloat16))
    read, num_bytes = PlainRead().of_blocks(caches, blocks, threads=1)
    read()
    assert num_bytes == 2 * moment.num_entries * 8 * BLOCK_SIZE * 128 * 2


def test_a_batch_of_many_lengths_has_a_short_name():
    lengths = [Group(1, 1, length) for length in (900, 17, 400)]
    assert str(Shape(1, 30, others=tuple(lengths))).startswith("decode 4 x 17-900 bfloat16 32/8 heads")


def test_inputs_are_saved_for_peers_as_they_are(moment, tmp_path: Path):
    inputs = Inputs(moment.shape("manager", "HND"), moment.tables, POOL)
    case = torch.load(inputs.save(tmp_path / "case.pt"))
    assert case["cache_shape"] == (POOL, 8, BLOCK_SIZE, 128)
    for row, table in zip(case["block_tables"], moment.tables, strict=True):
        assert row[: len(table)].tolist() == table.tolist()


def test_what_is_compared_takes_turns(tmp_path):
    bench, turns = Bench([], seconds=0.0, folder=tmp_path, threads=1), []

    def contender(name: str, seconds: float):
        return lambda: turns.append(name) or [seconds, seconds]

    shapes = [Shape(1, 64), Shape(1, 64, dtype=torch.float32)]
    entries = [
        Entry(
            shape,
            {"paged_kv": contender(f"{i} ours", 2e-3 * (i + 1)), "plain read": contender(f"{i} read", 1e-3)},
            ["plain read"],
            {},
        )
        for i, shape in enumerate(shapes)
    ]
    results = bench.measure_together("a part", entries)
    assert turns == ["0 ours", "0 read", "1 ours", "1 read"] * ROUNDS
    assert results == bench.results
    for result, shape, seconds in zip(results, shapes, (2e-3, 4e-3), strict=True):
        assert result["case"] == str(shape)
        assert result["rate"] == pytest.approx(2 * 64 * 8 * 128 * shape.dtype.itemsize / seconds)
        assert result["rate"] / result["limit_rate"] == pytest.approx(1e-3 / seconds)
        assert result["limit_share"] == pytest.approx(1e-3 / seconds)


def test_a_machine_that_slows_down_leaves_ratios_as_they_are(tmp_path):
    """It does so in the third round, after the one that was read has had its turn."""
    bench, turns = Bench([], seconds=0.0, folder=tmp_path, threads=1), []

    def contender(seconds: float):
        return lambda: [seconds * (1 if len(turns) < 6 else 3) for _ in range(turns.append(None) or 2)]

    contenders = {"paged_kv": contender(2e-3), "plain read": contender(1e-3)}
    (result,) = bench.measure_together("a part", [Entry(Shape(1, 64), contenders, ["plain read"], {})])
    assert result["rate"] / result["limit_rate"] != pytest.approx(0.5)
    assert result["limit_share"] == pytest.approx(0.5)
