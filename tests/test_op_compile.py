"""The ops under PyTorch's machinery: opcheck, torch.compile, autograd, version counters, threads."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from op_mistakes import VALID, WRITTEN
from torch import Tensor, library

from paged_kv import PagedKVCache, ops

HQ, HKV, D, N, B = 6, 2, 16, 64, 8


def overload(call: str) -> torch._ops.OpOverload:
    packet = getattr(torch.ops.paged_kv, call.split()[0])
    return packet.out if call.endswith(" out") else packet.default


# opcheck itself multiplies and compares inputs, which PyTorch does not do in float8.
@pytest.mark.parametrize("call", [call for call in VALID if call != "paged_attention quantised"])
def test_opcheck(call):
    library.opcheck(overload(call), (), VALID[call]())


@pytest.mark.parametrize("call", VALID)
def test_opcheck_fake(call):
    library.opcheck(overload(call), (), VALID[call](), test_utils=("test_faketensor",))


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


# Sizes and maxima all differ from call to call. In the first call none is like another by chance, nor like 0 or 1:
# torch.compile takes equal sizes for one, and gives 0 and 1 a graph of their own.
BATCHES = [
    Batch([70, 9, 14], [3, 2, 5]),
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


def of_a_cache() -> tuple[Tensor, Tensor]:
    """Of the second layer: its keys and values begin in the middle of the cache's memory."""
    last = PagedKVCache(2, HKV, D, torch.float32, B, num_blocks=N)[1]
    return last.key.copy_(torch.randn(N, HKV, B, D)), last.value.copy_(torch.randn(N, HKV, B, D))


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
    out, lse = ops.paged_attention(query * 0.5, key_cache, value_cache, *lengths, **maxima)
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
    """Results and written tensors are eager's bit for bit, and the first call compiles for all."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for call, stance in zip(calls, ["default"] + ["fail_on_recompile"] * (len(calls) - 1), strict=True):
        with torch.random.fork_rng():
            eager_arguments = call()
        with torch.random.fork_rng():
            arguments = call()
        expected = function(*eager_arguments)
        with torch.compiler.set_stance(stance):
            actual = compiled(*arguments)
        for a, b in zip([*actual, *arguments], [*expected, *eager_arguments], strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


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


@pytest.mark.parametrize("layout", [interleaved, of_a_cache])
def test_layer_compiles_once_with_inductor(layout):
    check_compiled(layer, layer_calls(layout), "inductor")


def test_layer_compiles_once_with_views_taken_inside():
    def layer_of_one_buffer(both: Tensor, query: Tensor, key: Tensor, value: Tensor, *lengths: object):
        return layer(query, key, value, both[:, 0], both[:, 1], *lengths)

    def call(batch_call: Callable[[], list]) -> list:
        query, key, value, _, _, *lengths = batch_call()
        return [torch.randn(N, 2, HKV, B, D), query, key, value, *lengths]

    calls = [partial(call, batch_call) for batch_call in layer_calls(separate)]
    check_compiled(layer_of_one_buffer, calls, "aot_eager")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_compile_once(layout):
    def call(batch: Batch, num_pairs: int) -> list:
        pairs = torch.randperm(N)[: 2 * num_pairs].reshape(num_pairs, 2)
        swaps = torch.stack([pairs[:, 0], torch.arange(num_pairs)], 1)
        lengths = [batch.block_tables, batch.seq_lens]
        return [*layout(), torch.zeros(N, HKV, B, D), *lengths, pairs, swaps]

    check_compiled(move, [partial(call, batch, 7 - i) for i, batch in enumerate(BATCHES)], "aot_eager")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_cache_compiles_once(dtype):
    def call(batch: Batch) -> list:
        both = torch.zeros(N, 2, HKV, B, D).to(dtype)
        scales = torch.ones(2, N, HKV, B)
        rows = [batch.key, batch.value, both[:, 0], both[:, 1], batch.slot_mapping, scales[0], scales[1]]
        return [*rows, batch.block_tables, batch.seq_lens]

    check_compiled(quantise, [partial(call, batch) for batch in BATCHES], "aot_eager")


WANTING = ("key", "value", "query", "src", "out_a", "lse_b", "sinks")  # arguments that ops only read


def wanting_gradients(call: str) -> dict:
    arguments = VALID[call]()
    for name, value in arguments.items():
        if name in WANTING and not (call == "gather_kv out" or not value.is_floating_point()):
            value.requires_grad_()
    return arguments


def assert_backward_raises(call: str, tensor: Tensor) -> None:
    op = call.split()[0]
    with pytest.raises(RuntimeError, match=f"derivative for paged_kv::{op} is not implemented"):
        tensor.float().sum().backward(retain_graph=True)


@pytest.mark.parametrize(
    "call",
    ["paged_attention", "paged_attention heads", "paged_attention quantised", "merge_attention_states"],
)
def test_backward_of_results_raises(call):
    for result in getattr(ops, call.split()[0])(**wanting_gradients(call)):
        assert_backward_raises(call, result)


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("reshape_and_cache", "key_cache"),
        ("reshape_and_cache", "value_cache"),
        ("reshape_and_cache_dynamic", "k_scale"),
        ("paged_attention out", "out"),
        ("paged_attention out", "lse"),
        ("swap_blocks", "dst"),
        ("merge_attention_states out", "out"),
        ("merge_attention_states out", "lse"),
    ],
)
def test_backward_of_written_tensors_raises(call, written):
    arguments = wanting_gradients(call)
    getattr(ops, call.split()[0])(**arguments)
    assert_backward_raises(call, arguments[written])


def test_backward_of_gathered_tensors_raises():
    arguments = VALID["gather_kv out"]()
    arguments["key_cache"].requires_grad_()
    ops.gather_kv(**arguments)
    given = [arguments.pop(name) for name in ("key", "value")]
    for tensor in *given, *ops.gather_kv(**arguments):
        assert_backward_raises("gather_kv", tensor)


def test_backward_of_copied_blocks_raises():
    cache = torch.randn(N, HKV, B, D, requires_grad=True) * 1
    ops.copy_blocks([], [cache], torch.tensor([[0, 1]]))
    assert_backward_raises("copy_blocks", cache)


def test_leaf_tensors_are_not_written():
    leaf = torch.zeros(N, HKV, B, D, requires_grad=True)
    message = "paged_kv::copy_blocks writes into a leaf tensor that requires grad, or a view of one"
    for cache in leaf, leaf[:, 1:]:
        with pytest.raises(RuntimeError, match=message):
            ops.copy_blocks([cache], [], torch.tensor([[0, 1]]))
        with torch.no_grad():
            ops.copy_blocks([cache], [], torch.tensor([[0, 1]]))


def test_forward_mode_differentiation_raises():
    with torch.autograd.forward_ad.dual_level():
        for call in "reshape_and_cache", "merge_attention_states":
            arguments = VALID[call]()
            name = "key" if "key" in arguments else "out_a"
            tangent = torch.ones_like(arguments[name])
            arguments[name] = torch.autograd.forward_ad.make_dual(arguments[name], tangent)
            # What torch raises for any op without forward-mode derivatives; a silent zero would be wrong.
            with pytest.raises(NotImplementedError, match="forward"):
                getattr(ops, call)(**arguments)


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
