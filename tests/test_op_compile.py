"""The ops under PyTorch's machinery: opcheck, torch.compile, autograd, version counters, threads."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from op_mistakes import VALID
from torch import Tensor

from paged_kv import ops

HQ, HKV, D, N, B = 4, 2, 16, 64, 4


def overload(call: str) -> torch._ops.OpOverload:
    packet = getattr(torch.ops.paged_kv, call.split()[0])
    return packet.out if call.endswith(" out") else packet.default


# opcheck itself multiplies and compares inputs, which PyTorch does not do in float8.
@pytest.mark.parametrize("call", [call for call in VALID if call != "paged_attention quantised"])
def test_opcheck(call):
    torch.library.opcheck(overload(call), (), VALID[call]())


@pytest.mark.parametrize("call", VALID)
def test_opcheck_fake(call):
    torch.library.opcheck(overload(call), (), VALID[call](), test_utils=("test_faketensor",))


class Batch:
    """New tokens of several sequences, packed, over a pool of blocks in random places; unused entries are -1."""

    def __init__(self, seq_lens: list[int], query_lens: list[int], spare_width: int = 0) -> None:
        widths = [-(-seq_len // B) for seq_len in seq_lens]
        blocks = torch.randperm(N, dtype=torch.int32)
        self.block_tables = torch.full((len(seq_lens), max(widths) + spare_width), -1, dtype=torch.int32)
        slots = []
        for seq, (seq_len, query_len, width) in enumerate(zip(seq_lens, query_lens, widths, strict=True)):
            table, blocks = blocks[:width], blocks[width:]
            self.block_tables[seq, :width] = table
            positions = torch.arange(seq_len - query_len, seq_len)
            slots.append(table[positions // B].long() * B + positions % B)
        self.slot_mapping = torch.cat(slots)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.max_query_len, self.max_seq_len = max(query_lens), max(seq_lens)
        num_tokens = sum(query_lens)
        self.query = torch.randn(num_tokens, HQ, D)
        self.key, self.value = torch.randn(2, num_tokens, HKV, D)


# Numbers of sequences and tokens, table widths, lengths and maxima all differ. None is 0 or 1: torch.compile always
# gives those a graph of their own.
BATCHES = [
    Batch([20, 9, 14], [3, 2, 5]),
    Batch([30, 12], [2, 12], spare_width=2),
    Batch([7, 8, 9, 10], [7, 4, 1, 2]),
    Batch([100, 101, 3, 3, 3], [2, 2, 2, 2, 3]),
]


def separate() -> tuple[Tensor, Tensor]:
    return torch.randn(N, HKV, B, D), torch.randn(N, HKV, B, D)


def interleaved() -> tuple[Tensor, Tensor]:
    both = torch.randn(N, 2, HKV, B, D)
    return both[:, 0], both[:, 1]


def token_major() -> tuple[Tensor, Tensor]:
    both = torch.randn(2, N, B, HKV, D)
    return both[0].transpose(1, 2), both[1].transpose(1, 2)


LAYOUTS = [separate, interleaved, token_major]


def layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    max_seq_len: int,
) -> tuple[Tensor, ...]:
    """What a model's layer does: store the new tokens and attend, with arithmetic before, between and after."""
    ops.reshape_and_cache(key * 2, value + 1, key_cache, value_cache, slot_mapping)
    lengths = block_tables, seq_lens, query_start_loc
    maxima = {"max_query_len": max_query_len, "max_seq_len": max_seq_len, "scale": 0.25}
    out, lse = ops.paged_attention(query.tanh(), key_cache, value_cache, *lengths, **maxima)
    near, near_lse = torch.empty_like(out), torch.empty_like(lse)
    ops.paged_attention(
        query, key_cache, value_cache, *lengths, **maxima, window=5, softcap=9.0, out=near, lse=near_lse
    )
    merged, merged_lse = ops.merge_attention_states(out, lse, near + 1, near_lse)
    return out.relu(), lse, near, near_lse, merged, merged_lse


def move(
    key_cache: Tensor,
    value_cache: Tensor,
    host_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    copies: Tensor,
    swaps: Tensor,
) -> tuple[Tensor, ...]:
    """What a manager asks for: copy-on-write, swap out, and a gather whose length only the data tells."""
    ops.copy_blocks([key_cache], [value_cache], copies)
    ops.swap_blocks(key_cache, host_cache, swaps)
    key, value = ops.gather_kv(key_cache, value_cache, block_tables, seq_lens)
    return key * 2, value.sum(0), host_cache + 1


def quantise(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, Tensor]:
    ops.reshape_and_cache_dynamic(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    return ops.gather_kv(key_cache, value_cache, block_tables, seq_lens, k_scale=k_scale, v_scale=v_scale)


def check_compiled(
    function: Callable[..., tuple[Tensor, ...]], calls: list[Callable[[], list]], backend: str
) -> None:
    """Results and written tensors of the compiled function are eager's bit for bit, in one graph for all calls."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for call in calls:
        with torch.random.fork_rng():
            eager_arguments = call()
        with torch.random.fork_rng():
            arguments = call()
        expected = function(*eager_arguments)
        actual = compiled(*arguments)
        for a, b in zip([*actual, *arguments], [*expected, *eager_arguments], strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert counter.frame_count == 1


def layer_calls(layout: Callable[[], tuple[Tensor, Tensor]]) -> list[Callable[[], list]]:
    def call(batch: Batch) -> list:
        key_cache, value_cache = layout()
        return [
            batch.query,
            batch.key,
            batch.value,
            key_cache,
            value_cache,
            batch.slot_mapping,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            batch.max_query_len,
            batch.max_seq_len,
        ]

    return [partial(call, batch) for batch in BATCHES]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_compiles_once(layout):
    check_compiled(layer, layer_calls(layout), "aot_eager")


def test_layer_compiles_once_with_inductor():
    check_compiled(layer, layer_calls(interleaved), "inductor")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_compile_once(layout):
    def call(batch: Batch, num_pairs: int) -> list:
        pairs = torch.randperm(N)[: 2 * num_pairs].reshape(num_pairs, 2)
        swaps = torch.stack([pairs[:, 0], torch.arange(num_pairs)], 1)
        lengths = [batch.block_tables, batch.seq_lens]
        return [*layout(), torch.zeros(N, HKV, B, D), *lengths, pairs, swaps]

    check_compiled(move, [partial(call, batch, 2 + i) for i, batch in enumerate(BATCHES)], "aot_eager")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_cache_compiles_once(dtype):
    def call(batch: Batch) -> list:
        both = torch.zeros(N, 2, HKV, B, D).to(dtype)
        scales = torch.ones(2, N, HKV, B)
        rows = [batch.key, batch.value, both[:, 0], both[:, 1], batch.slot_mapping, scales[0], scales[1]]
        return [*rows, batch.block_tables, batch.seq_lens]

    check_compiled(quantise, [partial(call, batch) for batch in BATCHES], "aot_eager")


def with_gradients(arguments: dict) -> dict:
    """The float arguments that an op only reads ask for gradients."""
    asked = ("key", "value", "query", "src", "out_a", "lse_b")
    return {
        name: value.requires_grad_() if name in asked and value.is_floating_point() else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("call", ["paged_attention", "paged_attention quantised", "merge_attention_states"])
def test_backward_of_results_raises(call):
    out, lse = getattr(ops, call.split()[0])(**with_gradients(VALID[call]()))
    for result in out, lse:
        with pytest.raises(RuntimeError, match="not implemented"):
            result.sum().backward(retain_graph=True)


def test_backward_of_gathered_tensors_raises():
    arguments = VALID["gather_kv out"]()
    del arguments["key"], arguments["value"]
    arguments["key_cache"].requires_grad_()
    for result in ops.gather_kv(**arguments):
        with pytest.raises(RuntimeError, match="not implemented"):
            result.sum().backward(retain_graph=True)


@pytest.mark.parametrize(
    ("call", "written"),
    [("reshape_and_cache", "key_cache"), ("reshape_and_cache", "value_cache"), ("swap_blocks", "dst")],
)
def test_backward_of_written_tensors_raises(call, written):
    arguments = with_gradients(VALID[call]())
    getattr(ops, call)(**arguments)
    with pytest.raises(RuntimeError, match="not implemented"):
        arguments[written].sum().backward()


def test_backward_of_copied_blocks_raises():
    source = torch.randn(N, HKV, B, D, requires_grad=True)
    cache = source * 1
    ops.copy_blocks([cache], [], torch.tensor([[0, 1]]))
    with pytest.raises(RuntimeError, match="not implemented"):
        cache.sum().backward()


@pytest.mark.parametrize("call", [call for call in VALID if call.endswith(" out")])
def test_given_results_refuse_gradients(call):
    arguments = VALID[call]()
    name = "query" if "query" in arguments else "key_cache" if "key_cache" in arguments else "out_a"
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        getattr(ops, call.split()[0])(**arguments)


WRITTEN = {
    "reshape_and_cache": ("key_cache", "value_cache"),
    "reshape_and_cache_dynamic": ("key_cache", "value_cache", "k_scale", "v_scale"),
    "paged_attention out": ("out", "lse"),
    "swap_blocks": ("dst",),
    "gather_kv out": ("key", "value"),
    "merge_attention_states out": ("out", "lse"),
}


@pytest.mark.parametrize("call", WRITTEN)
def test_writes_are_counted(call):
    """The version counter is what makes autograd notice that a tensor it saved has been written."""
    arguments = VALID[call]()
    before = {name: value._version for name, value in arguments.items() if isinstance(value, Tensor)}
    getattr(ops, call.split()[0])(**arguments)
    for name, version in before.items():
        written = name in WRITTEN[call]
        assert (arguments[name]._version > version) == written, name


def test_inference_tensors_are_written():
    with torch.inference_mode():
        arguments = VALID["reshape_and_cache"]()
        ops.reshape_and_cache(**arguments)
    assert torch.equal(arguments["key_cache"][0, :, 0], arguments["key"][0])
