"""What a replica's chats hold and have done, as Prometheus reads it (names: docs/develop/chat-stages.md)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab_model_servers.interfaces import CountsTokens, ServedModel

_GAUGES: Final[Mapping[str, tuple[str, str, Mapping[str, str]]]] = {
    "text_tokens": ("trimtab_pending_prefill_tokens", "Tokens still to be computed", {"kind": "text"}),
    "image_tokens": ("trimtab_pending_prefill_tokens", "Tokens still to be computed", {"kind": "image"}),
    "waiting": ("trimtab_chats", "Chats taken in", {"state": "waiting"}),
    "running": ("trimtab_chats", "Chats taken in", {"state": "running"}),
    "busy_slots": ("trimtab_kv_slots_used", "Slots of keys and values given away", {}),
    "slots": ("trimtab_kv_slots", "Slots of keys and values", {}),
    "embedding_bytes": ("trimtab_embedding_bytes", "Embeddings held for chats or to be pulled", {}),
    "kept": ("trimtab_embeddings_stored", "Names under which embeddings wait to be pulled", {}),
}
_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "steps": ("trimtab_engine_steps", "Steps computed"),
    "encoded_images": ("trimtab_encoded_images", "Images encoded"),
    "encode_seconds": ("trimtab_encode_seconds", "Seconds spent encoding"),
    "cache_hits": ("trimtab_embedding_cache_hits", "Images that were encoded, or being encoded, already"),
    "cache_misses": ("trimtab_embedding_cache_misses", "Images that were not"),
    "cache_evictions": ("trimtab_embedding_cache_evictions", "Embeddings given up for others"),
    "pulled_bytes": ("trimtab_embedding_transfer_bytes", "Embeddings pulled"),
    "pull_seconds": ("trimtab_embedding_transfer_seconds", "Seconds spent pulling"),
}


class _Chats(Collector):
    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Every family once, with a sample for each model that counts."""
        counting = {name: model for name, model in self._models.items() if isinstance(model, CountsTokens)}
        yield from _gauges({name: model.pending() for name, model in counting.items()})
        yield from _counters({name: model.done() for name, model in counting.items()})


class Page:
    """What was written lately, told again to whoever asks soon after: writing it stops the event loop of all chats.

    Args:
        write: writes it anew.
        fresh_seconds: for which it is told again.
    """

    def __init__(self, write: Callable[[], bytes], fresh_seconds: float = 1.0) -> None:
        self._write = write
        self._fresh_seconds = fresh_seconds
        self._written_at = -inf
        self._page = b""

    def at(self, now: float) -> bytes:
        """The page as it is told at a time, seconds on a clock that never goes back."""
        if now - self._written_at >= self._fresh_seconds:
            self._page, self._written_at = self._write(), now
        return self._page


def exposition(models: Mapping[str, ServedModel]) -> bytes:
    """The metrics of all models that chat, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Chats(models))
    return generate_latest(registry)


def _gauges(pending: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily] = {}
    for field, (name, words, labels) in _GAUGES.items():
        family = families.setdefault(name, GaugeMetricFamily(name, words, labels=["model", *labels]))
        for model, counts in pending.items():
            family.add_metric([model, *labels.values()], counts[field])
    yield from families.values()


def _counters(done: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    for field, (name, words) in _COUNTERS.items():
        family = CounterMetricFamily(name, words, labels=["model"])
        for model, counts in done.items():
            if field in counts:
                family.add_metric([model], counts[field])
        yield family
