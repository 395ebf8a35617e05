"""The figures: stats, and what Prometheus is told."""

from dataclasses import fields

import pytest
from manager_mirror import Mirror
from prometheus_client import CollectorRegistry

from paged_kv.manager import PagedKVCacheManager, PrometheusCollector, events


def test_prometheus_is_told_what_stats_tell():
    m = PagedKVCacheManager(8, 4)
    m.admit("a", list(range(10)))
    m.append(["a"], [list(range(10))])
    m.commit(["a"])
    registry = CollectorRegistry()
    PrometheusCollector(m, registry)
    m.fork("a", "b")
    assert registry.get_sample_value("paged_kv_num_shared_blocks") == 3
    assert registry.get_sample_value("paged_kv_num_held_tokens") == 10
    assert registry.get_sample_value("paged_kv_waste") == pytest.approx(2 / 12)
    assert registry.get_sample_value("paged_kv_forked_total") == 1
    m.free("b")
    assert registry.get_sample_value("paged_kv_num_shared_blocks") == 0
    for counter in fields(events.Counters):
        assert registry.get_sample_value(f"paged_kv_{counter.name}_total") is not None


def test_stats_are_a_picture_of_the_moment():
    m = PagedKVCacheManager(8, 4)
    before = m.stats()
    m.admit("a", 4)
    assert before.counters.admitted == 0
    assert m.stats().counters.admitted == 1


def test_a_subscriber_that_raises_is_logged_and_changes_nothing(caplog):
    def broken(event):
        raise RuntimeError("out of ink")

    quiet, heard = (PagedKVCacheManager(8, 4, num_host_blocks=8) for _ in range(2))
    mirror = Mirror(1)
    heard.subscribe(broken)
    heard.subscribe(mirror)
    for m in (quiet, heard):
        m.admit("a", list(range(10)))
        m.append(["a"], [list(range(10))])
        m.commit(["a"])
        m.fork("a", "b")
        assert m.append(["a", "b"], [[1], [2]]).block_copies
        m.swap_out(["b"])
        m.append(["a"], [list(range(13))])  # evicts
        m.rollback(["a"], [9])
        m.swap_in(["b"])
        m.reorder(["a"], ["b"])
        m.preempt("a")
        m.free("b")
        m.reset_prefix_cache()
        m.check()
    mirror.compare(heard)
    assert quiet.stats() == heard.stats()
    assert "a subscriber raised on Held" in caplog.text and "out of ink" in caplog.text


def test_waste_and_hit_rate_of_nothing_are_zero():
    stats = PagedKVCacheManager(8, 4).stats()
    assert (stats.waste, stats.hit_rate) == (0, 0)
