"""Prometheus metrics of the router. Names that other components read are defined in `trimtab_pipelines.router_metrics`.

Every series has the labels namespace and pipeline. Children are bound when a stage or outcome is first seen, so that
counting is cheap.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary, generate_latest
from prometheus_client.registry import Collector

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.sanitize import printable
from trimtab_router.observability.token_metrics import TokenMetrics, buckets_around

log = logging.getLogger(__name__)

BASE = ("namespace", "pipeline")
STAGE = (*BASE, "stage")
_LATENCY_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_QUEUE_EDGES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BATCH_EDGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Metrics of one pipeline's router, in a registry of their own."""

    def __init__(self, namespace: str, pipeline: str, slo: ServiceLevel) -> None:
        self.registry = CollectorRegistry()
        self._base = (namespace, pipeline)
        registry, base = self.registry, self._base

        def counter(name: str, text: str, labels: tuple[str, ...] = BASE) -> Counter:
            return Counter(name, text, labels, registry=registry)

        edges = buckets_around(_LATENCY_EDGES, slo.latency_seconds)
        self.received = counter(names.RECEIVED, "Total requests received").labels(*base)
        requests = counter(names.REQUESTS, "Total requests by outcome", (*BASE, "outcome"))
        self.outcomes = {end: requests.labels(*base, end.word) for end in RequestOutcome}
        self.client_errors = counter(
            "trimtab_client_errors", "Total requests refused or dropped because of the client"
        ).labels(*base)
        self.refusals = counter(
            "trimtab_refusals", "Total requests refused or failed, by code and reason", (*BASE, "code", "reason")
        )
        self.drops = counter(names.DROPS, "Total requests dropped, by stage and reason", (*STAGE, "reason"))
        self.retries = counter("trimtab_retries", "Total row slices retried, by reason", (*STAGE, "reason"))
        self.unescalated_responses = counter(
            names.UNESCALATED_RESPONSES, "Total responses with rows whose escalation did not finish in time", BASE
        ).labels(*base)
        self.latency = Histogram(
            names.LATENCY_SECONDS,
            "Latency of answered requests in seconds",
            BASE,
            buckets=edges,
            registry=registry,
        ).labels(*base)
        self.tokens = TokenMetrics(registry, base, slo)
        self.accuracy = Summary(
            names.EXPECTED_ACCURACY, "Expected accuracy of responses", BASE, registry=registry
        ).labels(*base)
        self.plan_generation = self._gauge("trimtab_plan_generation", "Generation of the current plan")
        self.bytes_in_flight = self._gauge(names.BYTES_IN_FLIGHT, "Bytes of requests in flight")
        self.requests_in_flight = self._gauge("trimtab_requests_in_flight", "Requests admitted and not answered yet")
        self.concurrency_limit = self._gauge("trimtab_concurrency_limit", "Maximum number of requests in flight")
        self.arrivals_peak = self._gauge(names.ARRIVALS_PEAK_RPS, "Peak arrivals per second in the last ten seconds")
        self.invalid_config = counter(
            "trimtab_invalid_config", "Total invalid plans or endpoint lists", (*BASE, "file")
        )
        self.stage_batch_size = Histogram(
            "trimtab_batch_size_rows",
            "Batch size in rows",
            (*STAGE, "variant"),
            buckets=_BATCH_EDGES,
            registry=registry,
        )
        self.stage_queue_seconds = Histogram(
            "trimtab_stage_queue_seconds",
            "Time in the queue until dispatch in seconds",
            STAGE,
            buckets=_QUEUE_EDGES,
            registry=registry,
        )
        self.stage_service_seconds = Histogram(
            "trimtab_stage_service_seconds",
            "Time from dispatch to response in seconds",
            (*STAGE, "variant"),
            buckets=_QUEUE_EDGES,
            registry=registry,
        )
        self.stage_rows = counter("trimtab_stage_rows", "Total rows served", STAGE)
        self.point_rows = counter(
            names.POINT_ROWS, "Total rows served by operating point", (*STAGE, "variant", "operating_point")
        )
        self.escalated_rows = counter(names.ESCALATED_ROWS, "Total rows escalated to a better operating point", STAGE)
        self.cancelled_rows = counter(
            names.CANCELLED_ROWS, "Total rows whose generation was cancelled by the client", STAGE
        )
        self.encoder_dedup = counter(
            names.ENCODER_DEDUP,
            "Total images that reused the encoding of an identical image, in flight or cached",
            (*STAGE, "source"),
        )
        self.early_prefills = counter(
            names.EARLY_PREFILLS, "Total chats whose prefill started before all images were encoded", STAGE
        )
        self.policy_errors = counter(
            names.POLICY_ERRORS,
            "Total failures of the scheduling policy, each replaced by EarliestDeadlineFirst",
            STAGE,
        )
        self.stage_queue_rows = Gauge("trimtab_queue_rows", "Rows in the queue", STAGE, registry=registry)
        self.stage_ready = Gauge("trimtab_ready_replicas", "Replicas ready for a batch", STAGE, registry=registry)
        self.unauthenticated_replicas = Gauge(
            "trimtab_unauthenticated_replicas",
            "Replicas excluded because their TLS identity is wrong",
            STAGE,
            registry=registry,
        )
        self.drifted_points = Gauge(
            names.DRIFTED_POINTS,
            "Operating points whose observed accuracy differs from the profiled one",
            STAGE,
            registry=registry,
        )
        self.stage_ratio = Gauge(
            "trimtab_service_ratio",
            "Ratio of observed to profiled service time",
            (*STAGE, "variant"),
            registry=registry,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, BASE, registry=self.registry).labels(*self._base)

    def register(self, collector: Collector) -> None:
        self.registry.register(collector)

    def stage(self, stage: str) -> "StageStats":
        return StageStats(self, stage, (*self._base, stage))

    def count_refusal(self, code: str, reason: str, count: int = 1) -> None:
        self.refusals.labels(*self._base, code, reason).inc(count)

    def count_drop(self, stage: str, reason: str) -> None:
        """Count a request dropped at a stage, or before the first one if the name is empty."""
        self.drops.labels(*self._base, stage, reason).inc()

    def count_invalid_file(self, file: str) -> None:
        self.invalid_config.labels(*self._base, file).inc()

    def exposition(self) -> Iterator[bytes]:
        """Text exposition, metric by metric, so that a scrape does not block requests."""
        for family in self.registry.collect():
            yield generate_latest(_SingleFamily(family))


class _SingleFamily(Collector):
    """Collector of one metric family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


class StageStats:
    """Metrics and log lines of one stage, as its scheduler reports them."""

    def __init__(self, metrics: Metrics, stage: str, labels: tuple[str, ...]) -> None:
        self._metrics = metrics
        self._stage = stage
        self._labels = labels
        self._rows = metrics.stage_rows.labels(*labels)
        self.observe_queue_seconds = metrics.stage_queue_seconds.labels(*labels).observe
        self.count_escalated_rows = metrics.escalated_rows.labels(*labels).inc
        self.count_cancelled_row = metrics.cancelled_rows.labels(*labels).inc
        self.count_early_prefill = metrics.early_prefills.labels(*labels).inc
        self._count_policy_error = metrics.policy_errors.labels(*labels).inc
        self._logged_errors: set[type[Exception]] = set()
        self._bound = lru_cache(self._bind)

    def _bind(self, key: tuple[str, str]) -> tuple[Histogram, Histogram, Gauge, Counter]:
        metrics, labels = self._metrics, (*self._labels, key[0])
        return (
            metrics.stage_batch_size.labels(*labels),
            metrics.stage_service_seconds.labels(*labels),
            metrics.stage_ratio.labels(*labels),
            metrics.point_rows.labels(*self._labels, *key),
        )

    def watch(
        self,
        *,
        queue_rows: Callable[[], float],
        ready_replicas: Callable[[], float],
        drifted_points: Callable[[], float],
        unauthenticated_replicas: Callable[[], float],
    ) -> None:
        """Set gauges that are read at each scrape."""
        metrics = self._metrics
        for gauge, value in (
            (metrics.stage_queue_rows, queue_rows),
            (metrics.stage_ready, ready_replicas),
            (metrics.drifted_points, drifted_points),
            (metrics.unauthenticated_replicas, unauthenticated_replicas),
        ):
            gauge.labels(*self._labels).set_function(value)

    def observe_batch(self, key: tuple[str, str], rows: int, seconds: float, ratio: float) -> None:
        batch_size, service, service_ratio, at_point = self._bound(key)
        batch_size.observe(rows)
        service.observe(seconds)
        service_ratio.set(ratio)
        self._rows.inc(rows)
        at_point.inc(rows)

    def count_deduplicated_row(self, source: str) -> None:
        self._metrics.encoder_dedup.labels(*self._labels, source).inc()

    def count_retry(self, reason: str) -> None:
        self._metrics.retries.labels(*self._labels, reason).inc()

    def record_policy_error(self, error: Exception) -> None:
        """Count a failure of the policy. Each kind of error is logged once, since there may be thousands a second."""
        self._count_policy_error()
        if type(error) not in self._logged_errors:
            self._logged_errors.add(type(error))
            log.error(
                "stage %s: its scheduling policy failed; EarliestDeadlineFirst decides instead",
                self._stage,
                exc_info=error,
            )

    def record_replica_error(self, message: str) -> None:
        log.warning("stage %s: %s", self._stage, printable(message))

    def record_request_error(self, request_id: str, message: str) -> None:
        log.error("stage %s: request %r failed: %s", self._stage, request_id, printable(message))
