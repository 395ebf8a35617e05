"""The manager's figures for Prometheus. Needs `pip install 'paged_kv[metrics]'`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from .._optional import optional_import
from .manager import PagedKVCacheManager

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_GAUGES = {
    "num_free_blocks": "Blocks that nobody holds and nobody can find",
    "num_evictable_blocks": "Blocks that only the prefix cache finds",
    "num_used_blocks": "Blocks with a holder",
    "num_shared_blocks": "Blocks with more than one holder",
    "num_pinned_blocks": "Blocks that a pin keeps",
    "num_used_host_blocks": "Host blocks of swapped sequences",
    "num_sequences": "Sequences on the device",
    "num_swapped_sequences": "Sequences on the host",
    "num_held_tokens": "Slots that hold a token",
    "waste": "Allocated slots holding no token, as a share of the allocated slots",
}

_COUNTERS = {
    "admitted": "Sequences admitted",
    "prompt_tokens": "Prompt tokens looked for in the prefix cache",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "stored": "Blocks that the prefix cache came to find",
    "evicted": "Blocks that the prefix cache no longer finds",
    "copied": "Blocks copied on write",
    "forked": "Sequences forked",
    "swapped_out": "Blocks copied to the host",
    "swapped_in": "Blocks copied back from the host",
    "preempted": "Sequences preempted",
}


class PrometheusCollector:
    """Answers each scrape from `manager.stats()`; nothing is counted twice and a step pays nothing.

    registry: where it is registered; prometheus-client's own by default, None for nowhere.
    """

    def __init__(self, manager: PagedKVCacheManager, registry: CollectorRegistry | None = ...) -> None:
        self._manager = manager
        self._core = optional_import("prometheus_client.core", "metrics")
        if registry is ...:
            registry = optional_import("prometheus_client", "metrics").REGISTRY
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        stats = self._manager.stats()
        for name, text in _GAUGES.items():
            yield self._core.GaugeMetricFamily(f"paged_kv_{name}", text, value=getattr(stats, name))
        for name, total in asdict(stats.counters).items():
            yield self._core.CounterMetricFamily(f"paged_kv_{name}", _COUNTERS[name], value=total)
