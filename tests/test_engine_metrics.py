"""What the engine tells about itself: figures, Prometheus' text, a trace of the steps."""

import io
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_engine import new_llm
from tiny_models import random_prompts, tiny_model

from paged_kv.engine import SamplingParams, StepTrace
from paged_kv.engine.metrics import BUCKETS, Histogram

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run():
    llm = new_llm(tiny_model("llama"), num_blocks=14)
    llm.engine.trace = StepTrace()
    prompts = random_prompts([7, 1, 12, 3, 9, 20])
    llm.generate([*prompts, []], SamplingParams(max_tokens=10, draft_tokens=2))
    return llm


def test_totals_add_up(run):
    metrics = run.metrics
    assert metrics.new_tokens == 60
    assert metrics.prompt_tokens == 52
    assert metrics.finished == {"length": 6, "refused": 1}
    assert metrics.recomputed == run.engine.num_preemptions > 0
    assert metrics.swapped == 0
    assert metrics.time_to_first_token.count == metrics.queue_time.count == 6
    assert metrics.inter_token_latency.count == 54
    assert 0 < metrics.model_seconds < metrics.step_seconds
    assert 0 < metrics.own_share < 1
    assert (metrics.num_running, metrics.num_waiting, metrics.cache_use) == (0, 0, 0)
    assert metrics.accepted_tokens <= metrics.drafted_tokens
    assert metrics.num_steps == run.cache_use.num_steps


def test_a_request_that_waits_is_seen_waiting():
    llm = new_llm(tiny_model("llama"), max_num_seqs=2)
    for prompt in random_prompts([5, 6, 7]):
        llm.engine.add_request(prompt, SamplingParams(max_tokens=3))
    llm.engine.step()
    assert (llm.metrics.num_running, llm.metrics.num_waiting) == (2, 1)
    assert llm.metrics.cache_use == 4 / 60


def test_quantiles_and_buckets():
    histogram = Histogram()
    assert histogram.quantile(0.5) == histogram.mean == 0
    for i in range(1, 101):
        histogram.observe(i / 100)
    assert (histogram.quantile(0.5), histogram.quantile(0.99), histogram.quantile(1)) == (0.51, 1.0, 1.0)
    assert histogram.mean == pytest.approx(0.505)
    assert sum(histogram.buckets[: BUCKETS.index(0.5) + 1]) == 50


def test_prometheus_can_read_all_of_it(run):
    families = {family.name: family for family in text_string_to_metric_families(run.metrics.prometheus())}
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["paged_kv_engine_new_tokens_total",] == 60
    assert values["paged_kv_engine_finished_total", "length"] == 6
    assert values["paged_kv_engine_finished_total", "refused"] == 1
    assert values["paged_kv_engine_inter_token_latency_seconds_bucket", "+Inf"] == 54
    assert values["paged_kv_engine_inter_token_latency_seconds_count",] == 54
    assert values["paged_kv_engine_num_running",] == 0
    assert families["paged_kv_engine_time_to_first_token_seconds"].type == "histogram"
    assert families["paged_kv_engine_new_tokens"].type == "counter"


def test_the_trace_tells_what_each_step_did(run):
    file = io.StringIO()
    run.engine.trace.write(file)
    events = json.loads(file.getvalue())["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == run.metrics.num_steps
    assert sum(step["args"]["tokens"] for step in steps) == run.metrics.computed_tokens
    assert max(step["args"]["blocks"] for step in steps) <= 14
    for step in steps:
        inner = [
            event
            for event in events
            if event["ph"] == "X"
            and event["name"] != "step"
            and step["ts"] <= event["ts"] <= step["ts"] + step["dur"]
        ]
        assert {"schedule", "model", "sample"} <= {event["name"] for event in inner}
    preempted = sum(event["args"]["requests"] for event in events if event["name"] == "preempted")
    assert preempted == run.engine.num_preemptions
    assert any(event["name"] == "blocks" and event["ph"] == "C" for event in events)
