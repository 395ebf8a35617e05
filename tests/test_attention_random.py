"""paged_attention on random cases. Sequences are short, so that a failing one shrinks to something readable."""

from cases import FLOATS, QUANTISED, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention import check


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(FLOATS))
    cache_dtype = draw(st.sampled_from((None, *QUANTISED)))
    scales = ("none", "tensor", "head", "token") if cache_dtype else ("none",)
    num_kv_heads = draw(st.integers(1, 3))
    lens = draw(st.lists(st.tuples(st.integers(0, 6) | st.integers(0, 70), st.integers(0, 90)), max_size=5))
    return Case(
        seqs=tuple((min(query_len, seq_len + 1), seq_len) for query_len, seq_len in lens),
        heads=(num_kv_heads * draw(st.integers(1, 9)), num_kv_heads),
        head_dim=draw(st.integers(1, 256)),
        block_size=draw(st.integers(1, 40) | st.sampled_from((64, 100, 1024))),
        dtype=dtype,
        cache_dtype=cache_dtype,
        k_scale=draw(st.sampled_from(scales)),
        v_scale=draw(st.sampled_from(scales)),
        causal=draw(st.booleans()),
        window=draw(st.just(-1) | st.integers(1, 100)),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0, 50.0))),
        alibi=draw(st.booleans()),
        sinks=draw(st.sampled_from((None, None, 0.0, 5.0))),
        cache_layout=draw(st.sampled_from(("nhd", "hnd", "interleaved", "head_major", "padded"))),
        query_layout=draw(st.sampled_from(("packed", "fused", "head_first", "padded"))),
    )


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=random_cases())
def test_random_cases(case: Case, backend) -> None:
    check(case, backend)
