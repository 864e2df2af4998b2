"""Metric families that count in plain numbers and hand over their samples at a scrape.

An observation is one call; a child of `prometheus_client` makes several and takes a lock.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString


class Count:
    """A number: of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def add_to(self, family: Any, labels: Sequence[str]) -> None:
        family.add_metric(labels, self.value)


class Observations:
    """Number and sum of observations: a summary."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.count += 1
        self.total += value

    def add_to(self, family: Any, labels: Sequence[str]) -> None:
        family.add_metric(labels, self.count, self.total)


class Buckets:
    """Sum of observations, and their number in each bucket: a histogram."""

    __slots__ = ("_counts", "_edges", "_total")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._total += value

    def add_to(self, family: Any, labels: Sequence[str]) -> None:
        edges = map(floatToGoString, (*self._edges, INF))
        family.add_metric(labels, list(zip(edges, accumulate(self._counts), strict=True)), self._total)


Child = TypeVar("Child", Count, Observations, Buckets)


class Family(Collector, Generic[Child]):
    """Children of a metric by the values of its labels."""

    def __init__(
        self, create_family: Callable[[], Metric], create_child: Callable[[], Child], registry: CollectorRegistry
    ) -> None:
        self._create_family = create_family
        self._create_child: Callable[[], Child] = create_child
        self._children: dict[tuple[str, ...], Child] = {}
        registry.register(self)

    def labels(self, *values: str) -> Child:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._create_child()
        return child

    def collect(self) -> Iterable[Metric]:
        family = self._create_family()
        for values, child in self._children.items():
            child.add_to(family, values)
        return (family,)


def counter(name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> Family[Count]:
    return Family(partial(CounterMetricFamily, name, text, labels=labels), Count, registry)


def gauge(name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> Family[Count]:
    return Family(partial(GaugeMetricFamily, name, text, labels=labels), Count, registry)


def summary(name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> Family[Observations]:
    return Family(partial(SummaryMetricFamily, name, text, labels=labels), Observations, registry)


def histogram(
    name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
) -> Family[Buckets]:
    return Family(partial(HistogramMetricFamily, name, text, labels=labels), partial(Buckets, buckets), registry)
