"""Prometheus metrics of a replica: its chat models and its event loop (names: docs/develop/chat-stages.md)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab_model_servers.server.interfaces import ServedModel, ServesChats

_GAUGES: Final[Mapping[str, tuple[str, str, Mapping[str, str]]]] = {
    "text_tokens": ("trimtab_pending_prefill_tokens", "Prompt and image tokens to compute", {"kind": "text"}),
    "image_tokens": ("trimtab_pending_prefill_tokens", "Prompt and image tokens to compute", {"kind": "image"}),
    "waiting": ("trimtab_chats", "Chats in flight", {"state": "waiting"}),
    "running": ("trimtab_chats", "Chats in flight", {"state": "running"}),
    "busy_slots": ("trimtab_kv_slots_used", "KV slots in use", {}),
    "slots": ("trimtab_kv_slots", "KV slots", {}),
    "embedding_bytes": ("trimtab_embedding_bytes", "Embeddings of chats in flight or stored for other replicas", {}),
    "stored_embeddings": ("trimtab_embeddings_stored", "Names under which embeddings are stored for replicas", {}),
}
_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "steps": ("trimtab_engine_steps", "Engine steps"),
    "encoded_images": ("trimtab_encoded_images", "Images encoded"),
    "encode_seconds": ("trimtab_encode_seconds", "Seconds spent encoding images"),
    "cache_hits": ("trimtab_embedding_cache_hits", "Images whose embeddings were cached or being computed"),
    "cache_misses": ("trimtab_embedding_cache_misses", "Images whose embeddings were not cached"),
    "cache_evictions": ("trimtab_embedding_cache_evictions", "Embeddings evicted from the cache"),
    "fetched_bytes": ("trimtab_embedding_transfer_bytes", "Bytes of embeddings fetched from other replicas"),
    "fetch_seconds": ("trimtab_embedding_transfer_seconds", "Seconds spent fetching embeddings"),
}


class _ReplicaCollector(Collector):
    def __init__(self, models: Mapping[str, ServedModel], lag_seconds: float) -> None:
        self._models = models
        self._lag_seconds = lag_seconds

    def collect(self) -> Iterable[Metric]:
        chats = {name: model for name, model in self._models.items() if isinstance(model, ServesChats)}
        yield from _gauges({name: model.pending() for name, model in chats.items()})
        yield from _counters({name: model.totals() for name, model in chats.items()})
        documentation = "Longest time of the last minute or two for which the event loop answered nothing"
        yield GaugeMetricFamily("trimtab_event_loop_lag_seconds", documentation, value=self._lag_seconds)


class CachedExposition:
    """Rendered metrics, cached for ``ttl_seconds``: rendering blocks the event loop of all chats."""

    def __init__(self, render: Callable[[], bytes], ttl_seconds: float = 1.0) -> None:
        self._render = render
        self._ttl_seconds = ttl_seconds
        self._rendered_at = -inf
        self._text = b""

    def at(self, now: float) -> bytes:
        if now - self._rendered_at >= self._ttl_seconds:
            self._text, self._rendered_at = self._render(), now
        return self._text


def exposition(models: Mapping[str, ServedModel], lag_seconds: float = 0.0) -> bytes:
    registry = CollectorRegistry()
    registry.register(_ReplicaCollector(models, lag_seconds))
    return generate_latest(registry)


def _gauges(pending: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily] = {}
    for field, (name, documentation, labels) in _GAUGES.items():
        family = families.setdefault(name, GaugeMetricFamily(name, documentation, labels=["model", *labels]))
        for model, counts in pending.items():
            family.add_metric([model, *labels.values()], counts[field])
    yield from families.values()


def _counters(totals: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    for field, (name, documentation) in _COUNTERS.items():
        family = CounterMetricFamily(name, documentation, labels=["model"])
        for model, counts in totals.items():
            if field in counts:
                family.add_metric([model], counts[field])
        yield family
