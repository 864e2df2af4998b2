"""Families of plain numbers expose what those of `prometheus_client` expose."""

from typing import Any

import prometheus_client as theirs
from prometheus_client import CollectorRegistry, generate_latest

from trimtab_router.observability import tallies

LABELS = ("pipeline", "stage")
EDGES = (0.1, 0.5, 2.0)


def test_expositions_are_those_of_prometheus_client():
    registries = CollectorRegistry(), CollectorRegistry()
    kinds: list[tuple[Any, ...]] = [
        (tallies.counter, tallies.gauge, tallies.summary, tallies.histogram),
        (theirs.Counter, theirs.Gauge, theirs.Summary, theirs.Histogram),
    ]
    for registry, (counter, gauge, summary, histogram) in zip(registries, kinds, strict=True):
        count = counter("a", "A", LABELS, registry=registry).labels("p", "s")
        level = gauge("b", "B", LABELS, registry=registry).labels("p", "s")
        total = summary("c", "C", LABELS, registry=registry).labels("p", "s")
        buckets = histogram("d", "D", LABELS, buckets=EDGES, registry=registry).labels("p", "s")
        for value in (0.0, 0.1, 0.3, 2.0, 70.0):
            count.inc(value)
            level.set(value)
            total.observe(value)
            buckets.observe(value)

    own, their = (generate_latest(registry).decode().splitlines() for registry in registries)
    assert own == [line for line in their if "_created" not in line]
