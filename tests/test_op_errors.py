"""Every error message of every op: one argument of a valid call is made wrong, the sentence is compared in
full, and every tensor is found as it was, bit for bit.

The checks stand before any kernel, so they need no `backend` fixture. The fake implementations are held to
the same sentences where dtypes and shapes show the mistake.
"""

import itertools
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import op_mistakes
import pytest
import torch
import torch.utils._pytree as pytree
from op_mistakes import HKV, HQ, MISTAKES, VALID, Arguments, B, D, Mistake, N
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from paged_kv import ops

SCALES = ("k_scale", "v_scale")


def tensors_of(arguments: Arguments) -> list[Tensor]:
    lists = [value if isinstance(value, list) else [value] for value in arguments.values()]
    return [value for values in lists for value in values if isinstance(value, Tensor)]


def storage_bytes(tensor: Tensor) -> Tensor:
    """A copy of all bytes behind a tensor, those between its elements included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


@pytest.mark.parametrize("call", VALID)
def test_valid_calls_pass(call):
    getattr(ops, call.split()[0])(**VALID[call]())


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_message_and_no_change(mistake: Mistake):
    arguments = mistake.arguments()
    before = [storage_bytes(tensor) for tensor in tensors_of(arguments)]
    with pytest.raises(ValueError) as error:
        getattr(ops, mistake.op)(**arguments)
    assert str(error.value) == mistake.message
    for tensor, content in zip(tensors_of(arguments), before, strict=True):
        assert torch.equal(storage_bytes(tensor), content)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_fake_implementation_raises_alike(mistake: Mistake):
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode:
        arguments = pytree.tree_map_only(Tensor, mode.from_tensor, mistake.arguments())
        prefix = mistake.message.partition(": expected")[0] + ": expected"
        if mistake.stage in ("dtype", "shape"):
            with pytest.raises(ValueError) as error:
                getattr(ops, mistake.op)(**arguments)
            assert str(error.value) == mistake.message
        else:  # seen without data, or when the compiled function runs
            try:
                getattr(ops, mistake.op)(**arguments)
            except ValueError as error:
                assert str(error).startswith(prefix)


@pytest.mark.parametrize("call", VALID)
def test_checks_run_stage_by_stage(call):
    """Of two mistakes in different arguments, the one of the earlier stage is told."""
    stages = ["dtype", "layout", "shape", "range"]
    alone = [m for m in MISTAKES if m.call == call and "apart from" not in m.message]  # in one argument only
    mistakes = {stage: [m for m in alone if m.stage == stage] for stage in stages}
    for early, late in itertools.combinations(stages, 2):
        for first, second in itertools.product(mistakes[early][:3], mistakes[late][-3:]):
            if first.argument != second.argument:
                arguments = second.arguments()
                arguments[first.argument] = first.arguments()[first.argument]
                with pytest.raises(ValueError, match=re.escape(first.message.split(", got")[0])):
                    getattr(ops, first.op)(**arguments)


ANCHORS = {
    "reshape_and_cache quantised": "key",
    "reshape_and_cache_dynamic": "key",
    "paged_attention quantised": "query",
    "paged_attention heads": "query",
    "paged_attention out": "query",
    "copy_blocks": "block_mapping",
    "gather_kv scaled": "key_cache",
    "gather_kv out": "key_cache",
    "merge_attention_states": "out_a",
    "merge_attention_states out": "out_a",
}


@pytest.mark.parametrize("call", ANCHORS)
def test_devices_are_the_same(call):
    """Without a second device, PyTorch's "meta" stands for one; the CPU kernel is then called past dispatch."""
    op = getattr(torch.ops.paged_kv, call.split()[0])
    kernel = (op.out if call.endswith(" out") else op.default).redispatch
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name, value in VALID[call]().items():
        if name == ANCHORS[call] or not isinstance(value, Tensor | list):
            continue
        arguments = VALID[call]()
        arguments[name] = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), value)
        label = f"{name}[0]" if isinstance(value, list) else name
        message = f"{label}: expected the device of {ANCHORS[call]}, cpu, got meta"
        for function in partial(kernel, cpu), getattr(ops, call.split()[0]):
            with pytest.raises(ValueError) as error:
                function(**arguments)
            assert str(error.value) == f"paged_kv::{call.split()[0]}: {message}"


def test_swap_reads_its_pairs_on_the_host():
    arguments = VALID["swap_blocks"]()
    arguments["block_mapping"] = arguments["block_mapping"].to("meta")
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with pytest.raises(ValueError, match=r"swap_blocks: block_mapping: expected device cpu, got meta$"):
        torch.ops.paged_kv.swap_blocks.default.redispatch(cpu, **arguments)


@pytest.mark.parametrize(
    ("call", "given", "missing"),
    [
        ("paged_attention out", "out", "lse"),
        ("gather_kv out", "key", "value"),
        ("merge_attention_states out", "out", "lse"),
    ],
)
def test_results_are_given_together(call, given, missing):
    for present, absent in (given, missing), (missing, given):
        arguments = VALID[call]()
        del arguments[absent]
        with pytest.raises(ValueError) as error:
            getattr(ops, call.split()[0])(**arguments)
        words = f"{absent}: expected a tensor, as {present} is one, got None"
        assert str(error.value) == f"paged_kv::{call.split()[0]}: {words}"


TENSOR, NUMBER, INTEGER = "a tensor", "a number", "a 64-bit integer"
WRONG_TYPES = {  # what is expected of an argument of such a type, and what is not one
    Tensor: (TENSOR, [np.zeros(3), [1, 2], 1.5, "x", None]),
    list: ("a sequence of tensors", [torch.zeros(2, 2), 3, None]),
    float: (NUMBER, [[0.5], "0.5", None, 1j, True, False]),
    int: (INTEGER, [[1], "1", 1.0, None, True, False, np.zeros(2), torch.zeros(2)]),
}


@pytest.mark.parametrize("call", VALID)
def test_another_python_type_is_told_in_a_sentence(call):
    for name, valid in VALID[call]().items():
        expected, values = WRONG_TYPES[type(valid)]
        if name in ("k_scale", "v_scale", "alibi_slopes", "sinks") and not call.endswith("_dynamic"):
            expected, values = f"{TENSOR} or None", values[:-1]
        if call.endswith(" out") and name in ("out", "lse", "key", "value"):
            values = values[:-1]  # None is told of by test_results_are_given_together
        for value in values:
            arguments = VALID[call]() | {name: value}
            before = [storage_bytes(tensor) for tensor in tensors_of(arguments)]
            with pytest.raises(TypeError) as error:
                getattr(ops, call.split()[0])(**arguments)
            got = value if value is None or isinstance(value, int | float | complex | str) else None
            got = type(value).__name__ if got is None and value is not None else repr(value)
            assert str(error.value) == f"paged_kv::{call.split()[0]}: {name}: expected {expected}, got {got}"
            for tensor, content in zip(tensors_of(arguments), before, strict=True):
                assert torch.equal(storage_bytes(tensor), content)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("window", -1.0, f"{INTEGER}, got -1.0"),
        ("window", "-1", f"{INTEGER}, got '-1'"),
        ("window", np.zeros(2), f"{INTEGER}, got ndarray"),
        ("softcap", np.zeros(2), f"{NUMBER}, got ndarray"),
        ("softcap", None, f"{NUMBER}, got None"),
        ("window", True, f"{INTEGER}, got True"),
        ("softcap", False, f"{NUMBER}, got False"),
        ("causal", "yes", "True or False, got 'yes'"),
        ("causal", None, "True or False, got None"),
        ("causal", 1, "True or False, got 1"),
        ("sinks", 0.0, f"{TENSOR} or None, got 0.0"),
    ],
)
def test_so_it_is_where_the_schema_has_a_default(name, value, words):
    with pytest.raises(TypeError) as error:
        ops.paged_attention(**VALID["paged_attention"]() | {name: value})
    assert str(error.value) == f"paged_kv::paged_attention: {name}: expected {words}"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_query_len", 2**63, f"{INTEGER}, got {2**63}"),
        ("max_seq_len", -(2**63) - 1, f"{INTEGER}, got {-(2**63) - 1}"),
        ("window", 2**63, f"{INTEGER}, got {2**63}"),
        ("scale", 10**400, "a finite float32, got 1000"),
        ("softcap", -(10**400), "a finite float32, got -1000"),
    ],
)
def test_an_integer_beyond_what_is_counted_in_is_told_in_a_sentence(name, value, words):
    with pytest.raises(ValueError, match=f"^paged_kv::paged_attention: {name}: expected {words}") as error:
        ops.paged_attention(**VALID["paged_attention"]() | {name: value})
    assert len(str(error.value)) < 120


@pytest.mark.parametrize("caches", [[None], (torch.zeros(N, 2), np.zeros(2))])
def test_of_a_sequence_the_place_is_told(caches):
    got = "None" if len(caches) == 1 else "ndarray"
    words = rf"key_caches\[{len(caches) - 1}\]: expected a tensor, got {got}$"
    with pytest.raises(TypeError, match=words):
        ops.copy_blocks(caches, [], op_mistakes.pairs((0, 1)))


def test_another_error_of_pytorch_passes_as_it_is(monkeypatch):
    class Failing:
        _schema = torch.ops.paged_kv.swap_blocks.default._schema

        def __call__(self, *args):
            raise RuntimeError("of its own") from OSError("its cause")

    monkeypatch.setattr(ops, "_ops", SimpleNamespace(swap_blocks=SimpleNamespace(default=Failing())))
    with pytest.raises(RuntimeError, match=r"^of its own$") as error:
        ops.swap_blocks(**VALID["swap_blocks"]())
    assert isinstance(error.value.__cause__, OSError)


def random_view(buffer: Tensor) -> Tensor:
    """A view of up to four dimensions: any strides, or those of a slice of a transposed contiguous tensor."""
    buffer = buffer.view([torch.int8, torch.int16, torch.int32][torch.randint(3, ())])
    sizes = torch.randint(1, 5, (int(torch.randint(1, 5, ())),)).tolist()
    if torch.rand(()) < 0.5:
        strides = torch.randint(0, 24, (len(sizes),)).tolist()
    else:
        wide = [size + int(torch.randint(0, 2, ())) for size in sizes]
        order = torch.randperm(len(wide)).tolist()
        strides, step = [0] * len(wide), int(torch.randint(1, 3, ()))
        for dim in order:
            strides[dim], step = step, step * wide[dim]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    spare = buffer.numel() - reach
    return buffer.as_strided(sizes, strides, int(torch.randint(0, spare, ()))) if spare > 0 else buffer[:1]


def addresses(view: Tensor) -> list[int]:
    """Of each byte of each element."""
    elements = torch.arange(view.untyped_storage().size() // view.element_size())
    first = elements.as_strided(view.shape, view.stride(), view.storage_offset()) * view.element_size()
    return (first[..., None] + torch.arange(view.element_size())).flatten().tolist()


def test_overlaps_are_found_exactly():
    """Against a set of addresses: no overlap is missed, and interleaved views do not raise a false alarm."""
    torch.manual_seed(0)
    buffer, verdicts = torch.zeros(512, dtype=torch.int8), []
    for _ in range(3000):
        a, b = random_view(buffer), random_view(buffer)
        in_a, in_b = addresses(a), addresses(b)
        try:
            ops.copy_blocks([a], [b], op_mistakes.pairs())
            message = ""
        except ValueError as error:
            message = str(error)
        if len(set(in_a)) < len(in_a):
            expected = "key_caches[0]: expected every element"
        elif len(set(in_b)) < len(in_b):
            expected = "value_caches[0]: expected every element"
        elif set(in_a) & set(in_b):
            expected = "expected memory apart"
        else:
            expected = ""
            assert "every element" not in message and "memory apart" not in message, (a.stride(), b.stride())
        assert expected in message, (a.shape, a.stride(), b.shape, b.stride())
        verdicts.append(expected)
    assert min(verdicts.count(verdict) for verdict in set(verdicts)) > 100 and len(set(verdicts)) == 4


def empty_pool() -> Arguments:
    """No blocks, tokens or sequences at all."""
    none = torch.zeros(0, HKV, B, D)
    tables = {"block_tables": torch.zeros(0, 0, dtype=torch.int32), "seq_lens": op_mistakes.ints()}
    return {"key_cache": none, "value_cache": none.clone(), **tables}


ROWS = {"key": torch.zeros(7, HKV, D), "value": torch.zeros(7, HKV, D)}
RIGHT: dict[str, tuple[str, Arguments]] = {
    "skipped tokens": ("reshape_and_cache", {"slot_mapping": torch.tensor([-1, -1, -7, 3, -1])}),
    "rows to spare": ("reshape_and_cache", ROWS),
    "no token": ("reshape_and_cache", {"slot_mapping": torch.tensor([], dtype=torch.int64)}),
    "no token, dynamic": ("reshape_and_cache_dynamic", {"slot_mapping": torch.tensor([], dtype=torch.int64)}),
    "scales of other slots": (
        "reshape_and_cache quantised",
        {
            name: torch.full((N, HKV, B), torch.nan).index_fill_(0, torch.tensor([0, 2, 5]), 1.0)
            for name in SCALES
        },
    ),
    "entries of a sequence without a query": (
        "paged_attention",
        {
            "query_start_loc": op_mistakes.ints(0, 5, 5),
            "max_query_len": 5,
            "block_tables": torch.tensor([[5, 0, 2], [-1, -1, -1]], dtype=torch.int32),
        },
    ),
    "entries behind the window": (
        "paged_attention window",
        {"block_tables": torch.tensor([[-1, 0, 2], [1, 4, 99]], dtype=torch.int32)},
    ),
    "fewer keys than queries": ("paged_attention", {"seq_lens": op_mistakes.ints(2, 0)}),
    "generous maxima": ("paged_attention", {"max_query_len": 1 << 40, "max_seq_len": 1 << 40}),
    "a vast window": ("paged_attention", {"window": (1 << 63) - 1}),
    "a table with strides": (
        "paged_attention",
        {"block_tables": torch.tensor([[5, 1], [0, 4], [2, 99]], dtype=torch.int32).T},
    ),
    "no block copied": ("copy_blocks", {"block_mapping": op_mistakes.pairs()}),
    "no tensor": ("copy_blocks", {"key_caches": [], "value_caches": []}),
    "tensors without elements": ("copy_blocks", {"key_caches": [torch.zeros(N, 0)], "value_caches": []}),
    "no block swapped": ("swap_blocks", {"block_mapping": op_mistakes.pairs()}),
    "an expanded source": ("swap_blocks", {"src": torch.ones(1, 1, B, D).expand(N, HKV, B, D)}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_unusual_but_right_passes(name):
    call, changes = RIGHT[name]
    getattr(ops, call.split()[0])(**{**VALID[call](), **changes})


def test_one_tensor_serves_as_both_caches_to_read():
    for call in "paged_attention", "gather_kv":
        arguments = VALID[call]()
        arguments["value_cache"] = arguments["key_cache"]
        getattr(ops, call)(**arguments)


def test_keys_swap_with_values_of_one_buffer():
    both = torch.randn(N, 2, HKV, B, D)
    expected = both[3, 0].clone()
    ops.swap_blocks(both[:, 0], both[:, 1], op_mistakes.pairs((3, 1)))
    assert torch.equal(both[1, 1], expected)


def test_empty_pool():
    pool = empty_pool()
    key, value = ops.gather_kv(**pool)
    assert key.shape == value.shape == (0, HKV, D)
    maxima = {"max_query_len": 0, "max_seq_len": 0, "scale": 1.0}
    out, lse = ops.paged_attention(
        torch.zeros(0, HQ, D), **pool, query_start_loc=op_mistakes.ints(0), **maxima
    )
    assert out.shape == (0, HQ, D) and lse.shape == (0, HQ)
    out, lse = ops.merge_attention_states(out, lse, out, lse)
    assert out.shape == (0, HQ, D) and lse.shape == (0, HQ)
    rows = torch.zeros(2, HKV, D)
    ops.reshape_and_cache(rows, rows, pool["key_cache"], pool["value_cache"], torch.tensor([-1, -1]))
    with pytest.raises(ValueError, match=r"slot_mapping: expected slots below N \* B = 0, got 0 for token 1"):
        ops.reshape_and_cache(rows, rows, pool["key_cache"], pool["value_cache"], torch.tensor([-1, 0]))
