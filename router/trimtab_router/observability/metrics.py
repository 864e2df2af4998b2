"""Prometheus metrics of the router. Names that other components read are defined in `trimtab_pipelines.router_state`.

Every series has the labels namespace and pipeline. Children are bound when a stage or outcome is first seen, so that
counting is cheap.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial

from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.registry import Collector

from trimtab_pipelines import router_state as names
from trimtab_pipelines.escalation import Key
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.chat.internal_wire import Usage
from trimtab_protocol.sanitize import printable
from trimtab_router.execution.response_metadata import StreamTiming
from trimtab_router.observability import tallies
from trimtab_router.observability.row_counts import RowCounts
from trimtab_router.observability.tallies import Buckets, Count
from trimtab_router.scheduling.replica_slots import EngineLoad

MODALITIES = ("text", "image")
_FIRST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_NEXT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_IMAGES_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)


def buckets_around(buckets: Iterable[float], target_seconds: float | None) -> list[float]:
    targets = [target_seconds * factor for factor in (0.5, 1.0, 2.0)] if target_seconds else []
    return sorted({*buckets, *targets})


class TokenMetrics:
    """Time to first token, time between chunks, images and tokens of streamed responses."""

    def __init__(self, registry: CollectorRegistry, base: tuple[str, str], slo: ServiceLevel) -> None:
        labels = ("namespace", "pipeline", "modality")

        def histogram(name: str, text: str, buckets: Iterable[float]) -> dict[str, Buckets]:
            metric = tallies.histogram(name, text, labels, buckets=list(buckets), registry=registry)
            return {modality: metric.labels(*base, modality) for modality in MODALITIES}

        self._first = histogram(
            names.TTFT_SECONDS,
            "Time to the first token in seconds",
            buckets_around(_FIRST_BUCKETS, slo.time_to_first_token_seconds),
        )
        self._next = histogram(
            names.TBT_SECONDS,
            "Time between two chunks of a response in seconds",
            buckets_around(_NEXT_BUCKETS, slo.time_per_output_token_seconds),
        )
        self._images = histogram(names.IMAGES, "Images per chat", _IMAGES_BUCKETS)
        tokens = tallies.counter(
            names.TOKENS, "Total tokens of prompts (in) and responses (out)", (*labels, "direction"), registry=registry
        )
        self._tokens = {
            (modality, direction): tokens.labels(*base, modality, direction)
            for modality in MODALITIES
            for direction in ("in", "out")
        }

    def observe_stream(self, stream: StreamTiming, images: int) -> None:
        modality = MODALITIES[images > 0]
        self._images[modality].observe(images)
        if stream.time_to_first_token is not None:
            self._first[modality].observe(stream.time_to_first_token)
        for seconds in stream.gaps:
            self._next[modality].observe(seconds)

    def count_tokens(self, usage: Usage, images: int) -> None:
        modality = MODALITIES[images > 0]
        self._tokens[modality, "in"].inc(usage.prompt)
        self._tokens[modality, "out"].inc(usage.completion)


log = logging.getLogger(__name__)

BASE = ("namespace", "pipeline")
STAGE = (*BASE, "stage")
_LATENCY_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_QUEUE_EDGES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BATCH_EDGES = (1, 2, 4, 8, 16, 32, 64, 128)


class StageFamilies:
    """Metrics with a label for the stage."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(tallies.counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(tallies.histogram, registry=registry)
        variant = (*STAGE, "variant")
        self.retries = counter("trimtab_retries", "Total row slices retried, by reason", (*STAGE, "reason"))
        self.batch_size = histogram("trimtab_batch_size_rows", "Batch size in rows", variant, buckets=_BATCH_EDGES)
        text = "Time in the queue until dispatch in seconds"
        self.queue_seconds = histogram("trimtab_stage_queue_seconds", text, STAGE, buckets=_QUEUE_EDGES)
        text = "Time from dispatch to response in seconds"
        self.service_seconds = histogram("trimtab_stage_service_seconds", text, variant, buckets=_QUEUE_EDGES)
        self.rows = counter("trimtab_stage_rows", "Total rows served", STAGE)
        text = "Total rows served by operating point"
        self.point_rows = counter(names.POINT_ROWS, text, (*variant, "operating_point"))
        text = "Total rows that a better operating point served again"
        self.escalated_rows = counter(names.ESCALATED_ROWS, text, (*STAGE, *names.ESCALATED_LABELS))
        text = "Total rows whose generation was cancelled by the client"
        self.cancelled_rows = counter(names.CANCELLED_ROWS, text, STAGE)
        text = "Total images that reused the encoding of an identical image, in flight or cached"
        self.encoder_dedup = counter(names.ENCODER_DEDUP, text, (*STAGE, "source"))
        text = "Total chats whose prefill started before all images were encoded"
        self.early_prefills = counter(names.EARLY_PREFILLS, text, STAGE)
        text = "Total failures of the scheduling policy, each replaced by EarliestDeadlineFirst"
        self.policy_errors = counter(names.POLICY_ERRORS, text, STAGE)
        self.queue_rows = gauge("trimtab_queue_rows", "Rows in the queue", STAGE)
        self.ready_replicas = gauge("trimtab_ready_replicas", "Replicas ready for a batch", STAGE)
        text = "Replicas excluded because their TLS identity is wrong"
        self.unauthenticated_replicas = gauge("trimtab_unauthenticated_replicas", text, STAGE)
        text = "1 for a replica that outlier detection has ejected"
        self.ejected_replicas = gauge("trimtab_replica_ejected", text, (*STAGE, "replica"))
        text = "Total ejections of replicas by outlier detection"
        self.ejections = counter("trimtab_replica_ejections", text, STAGE)
        text = "Requests in third-party engines, of all their clients, by state"
        self.engine_requests = gauge("trimtab_engine_requests", text, (*STAGE, "state"))
        text = "Share of the KV cache in use, of the fullest third-party engine"
        self.engine_cache_usage = gauge("trimtab_engine_kv_cache_usage_ratio", text, STAGE)
        text = "Preemptions in the third-party engines that run now"
        self.engine_preemptions = gauge("trimtab_engine_preemptions", text, STAGE)
        text = "Operating points whose observed accuracy differs from the profiled one"
        self.drifted_points = gauge(names.DRIFTED_POINTS, text, STAGE)
        text = "Greatest distance of a mix of classes from its evidence, if it has changed"
        self.output_drift = gauge(names.OUTPUT_DRIFT, text, STAGE)
        text = "Ratio of observed to profiled service time"
        self.ratio = tallies.gauge("trimtab_service_ratio", text, variant, registry=registry)


class Metrics:
    """Metrics of one pipeline's router, in a registry of their own."""

    def __init__(self, namespace: str, pipeline: str, slo: ServiceLevel) -> None:
        self.registry = CollectorRegistry()
        self._base = (namespace, pipeline)
        counter = partial(tallies.counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        base = self._base
        requests = counter(names.REQUESTS, "Total requests by outcome", (*BASE, "outcome"))
        self.received = counter(names.RECEIVED, "Total requests received", BASE).labels(*base)
        self.outcomes = {end: requests.labels(*base, end.word) for end in RequestOutcome}
        text = "Total requests refused or dropped because of the client"
        self.client_errors = counter(names.CLIENT_ERRORS, text, BASE).labels(*base)
        text = "Total requests refused or failed, by code and reason"
        self.refusals = counter("trimtab_refusals", text, (*BASE, "code", "reason"))
        self.drops = counter(names.DROPS, "Total requests dropped, by stage and reason", (*STAGE, "reason"))
        text = "Total responses with rows whose escalation did not finish in time"
        self.unescalated_responses = counter(names.UNESCALATED_RESPONSES, text, BASE).labels(*base)
        text, edges = "Latency of answered requests in seconds", buckets_around(_LATENCY_EDGES, slo.latency_seconds)
        latency = tallies.histogram(names.LATENCY_SECONDS, text, BASE, buckets=edges, registry=self.registry)
        self.latency = latency.labels(*base)
        text = "Expected accuracy of responses"
        self.accuracy = tallies.summary(names.EXPECTED_ACCURACY, text, BASE, registry=self.registry).labels(*base)
        self.tokens = TokenMetrics(self.registry, base, slo)
        text = "Total invalid plans or endpoint lists"
        self.invalid_config = counter("trimtab_invalid_config", text, (*BASE, "file"))

        text = "Generation of the current plan"
        self.plan_generation = gauge("trimtab_plan_generation", text, BASE).labels(*base)
        self.bytes_in_flight = gauge(names.BYTES_IN_FLIGHT, "Bytes of requests in flight", BASE).labels(*base)
        text = "Requests admitted and not answered yet"
        self.requests_in_flight = gauge("trimtab_requests_in_flight", text, BASE).labels(*base)
        text = "Maximum number of requests in flight"
        self.concurrency_limit = gauge("trimtab_concurrency_limit", text, BASE).labels(*base)
        text = "Peak arrivals per second in the last ten seconds"
        self.arrivals_peak = gauge(names.ARRIVALS_PEAK_RPS, text, BASE).labels(*base)
        text = "Unix time in seconds at which a certificate expires"
        self._certificates = gauge("trimtab_certificate_expiration_timestamp_seconds", text, (*BASE, "certificate"))
        self._stages = StageFamilies(self.registry)
        self.row_counts: defaultdict[str, RowCounts] = defaultdict(RowCounts)  # by stage

    def stage(self, stage: str) -> "StageStats":
        return StageStats(self._stages, stage, (*self._base, stage), self.row_counts[stage])

    def count_refusal(self, code: str, reason: str, count: int = 1) -> None:
        self.refusals.labels(*self._base, code, reason).inc(count)

    def count_drop(self, stage: str, reason: str) -> None:
        """Count a request dropped at a stage, or before the first one if the name is empty."""
        self.drops.labels(*self._base, stage, reason).inc()

    def record_certificate_expiration(self, certificate: str, expires_at: float) -> None:
        self._certificates.labels(*self._base, certificate).set(expires_at)

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

    def __init__(self, families: StageFamilies, stage: str, labels: tuple[str, ...], row_counts: RowCounts) -> None:
        self._families = families
        self._row_counts = row_counts
        self._stage = stage
        self._labels = labels
        self._rows = families.rows.labels(*labels)
        self.observe_queue_seconds = families.queue_seconds.labels(*labels).observe
        self.count_cancelled_row = families.cancelled_rows.labels(*labels).inc
        self.count_early_prefill = families.early_prefills.labels(*labels).inc
        self._count_policy_error = families.policy_errors.labels(*labels).inc
        self._logged_errors: set[type[Exception]] = set()
        self._bound = lru_cache(self._bind)

    def _bind(self, key: Key) -> tuple[Buckets, Buckets, Count, Count]:
        families, labels = self._families, (*self._labels, key[0])
        at_point = self._row_counts.served[key] = families.point_rows.labels(*self._labels, *key)
        return (
            families.batch_size.labels(*labels),
            families.service_seconds.labels(*labels),
            families.ratio.labels(*labels),
            at_point,
        )

    def watch(self, **gauges: Callable[[], float]) -> None:
        """Read these gauges of `StageFamilies` at each scrape."""
        for name, value in gauges.items():
            getattr(self._families, name).labels(*self._labels).set_function(value)

    def watch_engines(self, load: Callable[[], EngineLoad]) -> None:
        families, labels = self._families, self._labels
        for gauge, field in (
            (families.engine_requests.labels(*labels, "waiting"), "waiting"),
            (families.engine_requests.labels(*labels, "running"), "running"),
            (families.engine_cache_usage.labels(*labels), "cache_usage"),
            (families.engine_preemptions.labels(*labels), "preemptions"),
        ):
            gauge.set_function(partial(_field, load, field))

    def observe_batch(self, key: Key, rows: int, seconds: float, ratio: float) -> None:
        batch_size, service, service_ratio, at_point = self._bound(key)
        batch_size.observe(rows)
        service.observe(seconds)
        service_ratio.value = ratio
        self._rows.value += rows
        at_point.value += rows

    def count_escalated_rows(self, first: Key, second: Key, rows: int) -> None:
        count = self._row_counts.escalated.get((first, second))
        if count is None:
            count = self._families.escalated_rows.labels(*self._labels, *first, *second)
            self._row_counts.escalated[first, second] = count
        count.inc(rows)

    def count_low_confidence(self, key: Key, below: float, rows: int, low_rows: int) -> None:
        compared, low = self._row_counts.low_confidence[key, below]
        compared.inc(rows)
        low.inc(low_rows)

    def count_deduplicated_row(self, source: str) -> None:
        self._families.encoder_dedup.labels(*self._labels, source).inc()

    def count_retry(self, reason: str) -> None:
        self._families.retries.labels(*self._labels, reason).inc()

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

    def record_ejection(self, replica: str, reason: str) -> None:
        log.warning("stage %s: replica %s is ejected: %s", self._stage, replica, printable(reason))
        self._families.ejections.labels(*self._labels).inc()
        self._families.ejected_replicas.labels(*self._labels, replica).set(1)

    def record_ejection_end(self, replica: str) -> None:
        log.info("stage %s: replica %s is used again", self._stage, replica)
        self._families.ejected_replicas.labels(*self._labels, replica).set(0)

    def add_replica(self, replica: str) -> None:
        self._families.ejected_replicas.labels(*self._labels, replica).set(0)

    def forget_replica(self, replica: str) -> None:
        with suppress(KeyError):  # another one of its name was forgotten
            self._families.ejected_replicas.remove(*self._labels, replica)

    def record_request_error(self, request_id: str, message: str) -> None:
        log.error("stage %s: request %r failed: %s", self._stage, request_id, printable(message))


def _field(load: Callable[[], EngineLoad], field: str) -> float:
    return float(getattr(load(), field))
