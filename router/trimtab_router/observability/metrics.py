"""Every metric name and label of the router, once; those that others read stand where they read them too.

Names and units follow Prometheus; every series carries namespace and pipeline. Children are bound when a stage or
outcome is first seen, so that counting costs a request next to nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary, generate_latest
from prometheus_client.registry import Collector

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.spec import ServiceLevel
from trimtab_router.observability.token_metrics import TokenMetrics, buckets_around

BASE = ("namespace", "pipeline")
STAGE = (*BASE, "stage")
_LATENCY_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_QUEUE_EDGES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BATCH_EDGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one pipeline's router, in a registry of their own."""

    def __init__(self, namespace: str, pipeline: str, slo: ServiceLevel) -> None:
        self.registry = CollectorRegistry()
        self._base = (namespace, pipeline)
        registry, base = self.registry, self._base

        def counter(name: str, text: str, labels: tuple[str, ...] = BASE) -> Counter:
            return Counter(name, text, labels, registry=registry)

        edges = buckets_around(_LATENCY_EDGES, slo.latency_seconds)
        self.received = counter(names.RECEIVED, "Requests received, whatever became of them").labels(*base)
        requests = counter(names.REQUESTS, "Requests by outcome; they add up to those received", (*BASE, "outcome"))
        self.outcomes = {end: requests.labels(*base, end.word) for end in RequestOutcome}
        self.client_errors = counter(
            "trimtab_client_errors", "Of all requests, those refused or dropped by the caller's own doing"
        ).labels(*base)
        self.refusals = counter("trimtab_refusals", "Requests refused or failed, by reason", (*BASE, "code", "reason"))
        self.drops = counter(names.DROPS, "Requests dropped, by stage and reason", (*STAGE, "reason"))
        self.retries = counter("trimtab_retries", "Slices of batches sent again, by reason", (*STAGE, "reason"))
        self.provisional = counter(
            names.PROVISIONAL, "Answers with rows whose second look did not come in time", BASE
        ).labels(*base)
        self.latency = Histogram(
            names.LATENCY_SECONDS,
            "From arrival to answer, answered requests",
            BASE,
            buckets=edges,
            registry=registry,
        ).labels(*base)
        self.words = TokenMetrics(registry, base, slo)
        self.accuracy = Summary(
            names.SERVED_ACCURACY, "Expected accuracy of what served each answer", BASE, registry=registry
        ).labels(*base)
        self.plan_generation = self._gauge("trimtab_plan_generation", "Generation of the plan in force")
        self.bytes_in_flight = self._gauge(names.BYTES_IN_FLIGHT, "Payload of the requests under way")
        self.requests_in_flight = self._gauge("trimtab_requests_in_flight", "Requests let in and not answered yet")
        self.concurrency_limit = self._gauge("trimtab_concurrency_limit", "How many requests may be under way now")
        self.arrivals_peak = self._gauge(names.ARRIVALS_PEAK_RPS, "Most arrivals in one of the last ten whole seconds")
        self.invalid_config = counter(
            "trimtab_invalid_config", "Plan or endpoints files that could not be used", (*BASE, "file")
        )
        self.stage_batch_size = Histogram(
            "trimtab_batch_size_rows",
            "Rows of each batch",
            (*STAGE, "variant"),
            buckets=_BATCH_EDGES,
            registry=registry,
        )
        self.stage_queue_seconds = Histogram(
            "trimtab_stage_queue_seconds", "From queue to departure", STAGE, buckets=_QUEUE_EDGES, registry=registry
        )
        self.stage_service_seconds = Histogram(
            "trimtab_stage_service_seconds",
            "From departure to answer",
            (*STAGE, "variant"),
            buckets=_QUEUE_EDGES,
            registry=registry,
        )
        self.stage_rows = counter("trimtab_stage_rows", "Rows served", STAGE)
        self.point_rows = counter(
            names.POINT_ROWS, "Rows served at each operating point", (*STAGE, "variant", "operating_point")
        )
        self.rows_again = counter(names.ESCALATED_ROWS, "Rows that were looked at a second time", STAGE)
        self.stage_abandoned = counter(
            names.CANCELLED, "Rows nobody waited for any more while they were being written", STAGE
        )
        self.encoder_dedup = counter(
            names.ENCODER_DEDUP,
            "Images that had what was made for another request: they rode along, or were found where it was made",
            (*STAGE, "source"),
        )
        self.early_prefills = counter(
            names.EARLY_PREFILLS, "Chats that began before all of their images were encoded", STAGE
        )
        self.undecided = counter(
            names.POLICY_ERRORS,
            "Decisions that the departure policy failed at; EarliestDeadlineFirst made them instead",
            STAGE,
        )
        self.stage_queue_rows = Gauge("trimtab_queue_rows", "Rows waiting", STAGE, registry=registry)
        self.stage_ready = Gauge("trimtab_ready_replicas", "Replicas ready to take a batch", STAGE, registry=registry)
        self.stage_refused = Gauge(
            "trimtab_unauthenticated_replicas",
            "Replicas that get no work, not being who they must be",
            STAGE,
            registry=registry,
        )
        self.stage_drifted = Gauge(
            names.DRIFTED_POINTS,
            "Operating points that are not as accurate as they were measured to be",
            STAGE,
            registry=registry,
        )
        self.stage_ratio = Gauge(
            "trimtab_service_ratio", "Observed over profiled service time", (*STAGE, "variant"), registry=registry
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, BASE, registry=self.registry).labels(*self._base)

    def register(self, collector: Collector) -> None:
        """Add a collector of somebody else's to what is exposed."""
        self.registry.register(collector)

    def stage(self, stage: str) -> "StageMetrics":
        """The metrics of one stage."""
        return StageMetrics(self, (*self._base, stage))

    def refused(self, code: str, reason: str, count: int = 1) -> None:
        """Count refusals or failures."""
        self.refusals.labels(*self._base, code, reason).inc(count)

    def dropped(self, stage: str, reason: str) -> None:
        """Count a request dropped at a stage; at none where its name is empty."""
        self.drops.labels(*self._base, stage, reason).inc()

    def broken_file(self, file: str) -> None:
        """Count a file that could not be used."""
        self.invalid_config.labels(*self._base, file).inc()

    def families(self) -> Iterator[bytes]:
        """The text Prometheus scrapes, metric by metric: all at once would hold up who is served meanwhile."""
        for family in self.registry.collect():
            yield generate_latest(_Alone(family))


class _Alone(Collector):
    """One metric, as it was when it was collected."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """It alone."""
        return (self._family,)


class StageMetrics:
    """The metrics of one stage, with its labels bound."""

    def __init__(self, metrics: Metrics, labels: tuple[str, ...]) -> None:
        self._metrics = metrics
        self._labels = labels
        self.queue_seconds = metrics.stage_queue_seconds.labels(*labels)
        self.rows = metrics.stage_rows.labels(*labels)
        self.looks_again = metrics.rows_again.labels(*labels).inc
        self.abandoned = metrics.stage_abandoned.labels(*labels).inc
        self.early_prefills = metrics.early_prefills.labels(*labels).inc
        self.undecided = metrics.undecided.labels(*labels).inc
        self._bound = lru_cache(self._bind)

    def _bind(self, key: tuple[str, str]) -> tuple[Histogram, Histogram, Gauge, Counter]:
        metrics, labels = self._metrics, (*self._labels, key[0])
        return (
            metrics.stage_batch_size.labels(*labels),
            metrics.stage_service_seconds.labels(*labels),
            metrics.stage_ratio.labels(*labels),
            metrics.point_rows.labels(*self._labels, *key),
        )

    def watch(self, queue_rows: Callable[[], float], ready_replicas: Callable[[], float]) -> None:
        """Read these when scraped."""
        self._metrics.stage_queue_rows.labels(*self._labels).set_function(queue_rows)
        self._metrics.stage_ready.labels(*self._labels).set_function(ready_replicas)

    def watch_drifted(self, points: Callable[[], float]) -> None:
        """Read this when scraped."""
        self._metrics.stage_drifted.labels(*self._labels).set_function(points)

    def watch_refused(self, replicas: Callable[[], float]) -> None:
        """Read this when scraped."""
        self._metrics.stage_refused.labels(*self._labels).set_function(replicas)

    def served(self, key: tuple[str, str], rows: int, service_seconds: float, ratio: float) -> None:
        """Count a batch that was served by a variant at a point."""
        batch_size, service, service_ratio, at_point = self._bound(key)
        batch_size.observe(rows)
        service.observe(service_seconds)
        service_ratio.set(ratio)
        self.rows.inc(rows)
        at_point.inc(rows)

    def shared(self, source: str) -> None:
        """Count an image that has what was made for another request."""
        self._metrics.encoder_dedup.labels(*self._labels, source).inc()

    def retried(self, reason: str) -> None:
        """Count a slice that is sent again."""
        self._metrics.retries.labels(*self._labels, reason).inc()
