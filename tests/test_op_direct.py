"""The ops that `paged_kv.ops` calls without torch.ops: same results, same errors, and torch.ops where it is needed."""

import gc
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch
from compare import assert_same_bits
from op_mistakes import VALID
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paged_kv import ops
from paged_kv.build_info import native

DIRECT = dict(zip(("reshape_and_cache", "paged_attention"), native.direct_calls("paged_kv"), strict=True))
CALLS = [call for call in VALID if call.split()[0] in DIRECT]


def positions(call: str, arguments: dict[str, object]) -> list[object]:
    """`arguments` as the direct function takes them: all of the schema, then what is written."""
    packet = getattr(torch.ops.paged_kv, call.split()[0])
    schema = (packet.out if "out" in packet.overloads() else packet.default)._schema
    return [arguments.get(argument.name, argument.default_value) for argument in schema.arguments]


def clone(arguments: dict[str, object]) -> dict[str, object]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize("call", CALLS)
def test_the_same_as_torch_ops(call):
    name = call.split()[0]
    packet = getattr(torch.ops.paged_kv, name)
    arguments = VALID[call]()
    other = clone(arguments)
    result = DIRECT[name](*positions(call, arguments))
    expected = (packet.out if call.endswith(" out") else packet.default)(**other)
    for written, value in arguments.items():
        if isinstance(value, Tensor):
            assert_same_bits(value, other[written], written)
    if call.endswith(" out"):
        assert all(mine is arguments[given] for mine, given in zip(result, ("out", "lse"), strict=True))
    elif expected is not None:
        for mine, theirs in zip(result, expected, strict=True):
            assert_same_bits(mine, theirs, "result")
    else:
        assert result is None


class Renamed(Tensor):
    pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", None),
        ("query", np.zeros(2)),
        ("query", torch.zeros(1).as_subclass(Renamed)),
        ("sinks", 0.0),
        ("sinks", torch.zeros(1).as_subclass(Renamed)),
        ("max_query_len", True),
        ("max_query_len", 4.0),
        ("max_query_len", np.int64(4)),
        ("max_seq_len", 1 << 63),
        ("max_seq_len", -(1 << 63) - 1),
        ("scale", 1),
        ("scale", np.float64(1)),
        ("causal", 1),
        ("causal", None),
        ("out", torch.zeros(1)),
        ("lse", torch.zeros(1)),
    ],
)
def test_what_is_not_of_the_exact_type_goes_to_torch_ops(name, value):
    arguments = VALID["paged_attention"]() | {name: value}
    assert DIRECT["paged_attention"](*positions("paged_attention", arguments)) is NotImplemented


def test_parameters_are_tensors():
    arguments = VALID["paged_attention"]()
    expected = ops.paged_attention(**arguments)
    arguments["query"] = torch.nn.Parameter(arguments["query"], requires_grad=False)
    result = DIRECT["paged_attention"](*positions("paged_attention", arguments))
    assert_same_bits(result[0], expected[0], "out")


def seen_op(call: str) -> str:
    return f"paged_kv.{call.split()[0]}.{'out' if call.endswith(' out') else 'default'}"


@pytest.mark.parametrize("call", CALLS)
def test_function_modes_and_subclasses_see_the_call(call):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **kwargs or {})

    class Subclass(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs)

    arguments = VALID[call]()
    with Mode():
        getattr(ops, call.split()[0])(**arguments)
    assert seen_op(call) in seen
    seen.clear()
    first = next(iter(arguments))
    getattr(ops, call.split()[0])(**arguments | {first: arguments[first].as_subclass(Subclass)})
    assert seen_op(call) in seen


@pytest.mark.parametrize("call", CALLS)
def test_dispatch_modes_see_the_call(call):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **kwargs or {})

    with Mode():
        getattr(ops, call.split()[0])(**VALID[call]())
    assert seen_op(call) in seen


def test_an_error_of_a_dispatch_mode_passes_as_it_is():
    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise KeyError("of its own")

    arguments = VALID["paged_attention"]()
    with Failing(), pytest.raises(KeyError, match="of its own"):
        ops.paged_attention(**arguments)


def test_fake_tensors_give_fake_results():
    with FakeTensorMode() as mode:
        arguments = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in VALID["paged_attention"]().items()
        }
        out, lse = ops.paged_attention(**arguments)
    assert isinstance(out, FakeTensor) and isinstance(lse, FakeTensor)
    assert out.shape == arguments["query"].shape


def test_symbolic_sizes_are_traced():
    arguments = VALID["paged_attention"]()

    def attend(query):
        return ops.paged_attention(**arguments | {"query": query, "max_query_len": query.shape[0]})[0]

    traced = make_fx(attend, tracing_mode="symbolic", _allow_non_fake_inputs=True)(arguments["query"])
    assert "paged_kv.paged_attention.default" in str(traced.code)
    assert_same_bits(traced(arguments["query"]), attend(arguments["query"]), "out")


def test_symbolic_truth_is_traced():
    arguments = VALID["paged_attention"]()

    def attend(query):
        return ops.paged_attention(**arguments | {"query": query, "causal": query.shape[0] > 1})[0]

    traced = make_fx(attend, tracing_mode="symbolic", _allow_non_fake_inputs=True)(arguments["query"])
    assert_same_bits(traced(arguments["query"]), attend(arguments["query"]), "out")


def test_nothing_else_is_asked():
    """Plain arguments never reach torch.ops: else the functions would be no use, and no result would show it."""
    with mock.patch.object(ops, "_ops", None):
        ops.paged_attention(**VALID["paged_attention"]())
        ops.paged_attention(**VALID["paged_attention out"]())
        ops.reshape_and_cache(**VALID["reshape_and_cache"]())


def test_errors_are_those_of_torch_ops():
    arguments = VALID["paged_attention"]()
    arguments["max_seq_len"] = 1
    with pytest.raises(ValueError) as expected:
        torch.ops.paged_kv.paged_attention(**arguments)
    with pytest.raises(ValueError) as error:
        DIRECT["paged_attention"](*positions("paged_attention", arguments))
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("name", DIRECT)
def test_a_wrong_number_of_arguments(name):
    with pytest.raises(TypeError, match=rf"^{name}: expected \d+ arguments, got 0$"):
        DIRECT[name]()


def test_no_library_without_its_ops():
    with pytest.raises(RuntimeError, match="no_such_library::reshape_and_cache"):
        native.direct_calls("no_such_library")


def test_no_reference_is_lost():
    store, attend = native.direct_calls("paged_kv")  # hold the ops by themselves
    rows = positions("reshape_and_cache", VALID["reshape_and_cache"]())
    given = positions("paged_attention out", VALID["paged_attention out"]())
    unlike = [*given[:7], 1, *given[8:]]  # max_seq_len is too small
    many, few = 20_000, 1000

    def counts():
        gc.collect()
        held = [value for value in (*rows, *given) if value is not None]
        return [sys.getrefcount(value) for value in (None, NotImplemented, store, attend, *held)]

    before = counts()
    for _ in range(many):
        assert store(*rows) is None
        attend(*given)
        attend(*given[:16], None, None)
        assert attend(None, *given[1:]) is NotImplemented
    for _ in range(few):
        with pytest.raises(ValueError, match="max_seq_len"):
            attend(*unlike)
    # What else the process holds of None changes, too.
    for count, so_far in zip(counts(), before, strict=True):
        assert abs(count - so_far) < (many / 2 if so_far > 1000 else few / 2)


def attend_long(before, after) -> None:
    """One thread's call of a tenth of a second, between two calls of its own."""
    length = 4096
    query = torch.randn(length, 16, 64)
    key_cache, value_cache = torch.randn(2, length // 16, 16, 16, 64)
    args = [query, key_cache, value_cache, torch.arange(length // 16, dtype=torch.int32)[None]]
    args += [torch.tensor([length], dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32)]
    with torch.inference_mode():
        before(args)
        ops.paged_attention(*args, max_query_len=length, max_seq_len=length, scale=0.1)
        after(args)


@pytest.fixture
def no_forced_turns():
    """A thread that does not let go keeps the others waiting."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval)


def test_other_threads_run_meanwhile(no_forced_turns):
    steps, seen = 0, []
    thread = threading.Thread(target=attend_long, args=[lambda args: seen.append(steps)] * 2)
    thread.start()
    while thread.is_alive():
        steps += 1
        time.sleep(0)  # lets go
    assert seen[1] > seen[0]


def test_tensors_are_held_meanwhile(no_forced_turns):
    """Else another thread could free one that is being read, by exchanging it for another."""
    running, counts = threading.Event(), []

    def before(args):
        counts.append(args)
        running.set()

    thread = threading.Thread(target=attend_long, args=[before, lambda args: None])
    thread.start()
    running.wait()
    (args,) = counts
    most = 0
    while thread.is_alive():
        most = max(most, min(tensor._use_count() for tensor in args))
        time.sleep(0)
    assert most > 1
