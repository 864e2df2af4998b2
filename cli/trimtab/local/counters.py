"""Counters of a router, and the latencies computed from their histograms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from prometheus_client.parser import text_string_to_metric_families

from trimtab_pipelines import router_state as names
from trimtab_pipelines.escalation import Key
from trimtab_pipelines.request_outcome import RequestOutcome

_BUCKETS = tuple(f"{name}_bucket" for name in (names.LATENCY_SECONDS, names.TTFT_SECONDS, names.TBT_SECONDS))
_ROWS = (names.POINT_ROWS, names.ESCALATED_ROWS)
CHAT_LABELS: Final[Mapping[str, str]] = {"text": "text-only chats", "image": "chats with images"}
"""Labels of the modalities that metrics and records name."""


RowsByStage = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a router since its start. Buckets map upper edges in seconds to cumulative counts."""

    received: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    latency_buckets: Mapping[float, float] = field(default_factory=dict)
    accuracy_sum: float = 0.0
    accuracy_count: int = 0
    client_errors: int = 0
    """Requests rejected or dropped because of the client."""
    pipeline: str = ""
    first_token_buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Times to first token, by modality."""
    next_token_buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Times between tokens, by modality."""
    served_rows: RowsByStage = field(default_factory=dict)
    """By stage and point, such as `read-m/default`; an escalated row counts at both of its points."""
    escalated_rows: RowsByStage = field(default_factory=dict)
    """By stage, and first and second point, such as `read-m/default read-xl/default`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text format of Prometheus."""
        values: dict[str, Any] = {}
        outcomes, drops = dict.fromkeys((end.word for end in RequestOutcome), 0), {}
        nested: dict[str, dict[str, dict[Any, float]]] = {name: {} for name in (*_BUCKETS, *_ROWS)}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels, value = sample.labels, sample.value
                if sample.name == names.RECEIVED:
                    values |= {"received": int(value), "pipeline": labels.get("pipeline", "")}
                elif sample.name == names.CLIENT_ERRORS:
                    values["client_errors"] = int(value)
                elif sample.name == names.REQUESTS:
                    outcomes[labels["outcome"]] = int(value)
                elif sample.name == names.DROPS:
                    drops[f"{labels['stage']}: {labels['reason']}"] = int(value)
                elif sample.name in nested:
                    group, key = _nested_labels(labels)
                    nested[sample.name].setdefault(group, {})[key] = value
                elif sample.name == f"{names.EXPECTED_ACCURACY}_sum":
                    values["accuracy_sum"] = value
                elif sample.name == f"{names.EXPECTED_ACCURACY}_count":
                    values["accuracy_count"] = int(value)
        latency, first, following = (nested[name] for name in _BUCKETS)
        return cls(
            **values,
            outcomes=outcomes,
            drops=drops,
            latency_buckets=latency.get("", {}),
            first_token_buckets=_nonempty(first),
            next_token_buckets=_nonempty(following),
            served_rows=nested[names.POINT_ROWS],
            escalated_rows=nested[names.ESCALATED_ROWS],
        )


def _nested_labels(labels: Mapping[str, str]) -> tuple[str, float | str]:
    """Modality and edge of a bucket, or stage and point of rows, or stage and both points of escalated rows."""
    if "le" in labels:
        return labels.get("modality", ""), float(labels["le"])
    key = f"{labels['variant']}/{labels['operating_point']}"
    again = [labels[name] for name in names.ESCALATED_LABELS[2:] if name in labels]
    return labels["stage"], f"{key} {'/'.join(again)}" if again else key


def rows_since(before: Counters, after: Counters, stage: str) -> tuple[dict[Key, float], dict[tuple[Key, Key], float]]:
    """Rows of a stage that its points served, and escalated rows, between two samples of a router."""
    served, escalated = (
        {name: max(count - earlier.get(name, 0.0), 0.0) for name, count in later.get(stage, {}).items()}
        for earlier, later in (
            (before.served_rows.get(stage, {}), after.served_rows),
            (before.escalated_rows.get(stage, {}), after.escalated_rows),
        )
    )
    return {_key(name): count for name, count in served.items()}, {
        (_key(first), _key(second)): count for name, count in escalated.items() for first, second in [name.split(" ")]
    }


def _key(name: str) -> Key:
    variant, point = name.split("/")
    return variant, point


def _nonempty(buckets: Mapping[str, Mapping[float, float]]) -> dict[str, Mapping[float, float]]:
    return {modality: edges for modality, edges in buckets.items() if edges.get(math.inf)}


def bucket_increase(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    return {edge: count - before.get(edge, 0.0) for edge, count in after.items()}


def quantile_upper_bound(buckets: Mapping[float, float], quantile: float) -> float | None:
    """Upper edge of the bucket that holds a quantile; None if the buckets are empty."""
    edges = sorted(buckets)
    if not edges or buckets[edges[-1]] <= 0:
        return None
    return next(edge for edge in edges if buckets[edge] >= quantile * buckets[edges[-1]])


def median_and_p99(buckets: Mapping[float, float]) -> tuple[float, float]:
    """Upper bounds of median and p99 in seconds; NaN if the buckets are empty."""
    p50, p99 = (quantile_upper_bound(buckets, quantile) for quantile in (0.5, 0.99))
    return math.nan if p50 is None else p50, math.nan if p99 is None else p99


@dataclass(frozen=True, slots=True)
class ChatStats:
    """Streamed chats of one modality; NaN if nothing was measured.

    Times between tokens are means of responses in a load test's results, and single times in a router's counters.
    """

    answered: int
    in_time_fraction: float
    """Share of received requests answered within the SLO; a router does not count it by modality."""
    first_token_p50_seconds: float
    first_token_p99_seconds: float
    next_token_p50_seconds: float
    next_token_p99_seconds: float


def chat_stats(counters: Counters, modality: str) -> ChatStats:
    """Compute the statistics from a router's counters, with quantiles rounded up to bucket edges."""
    first, following = counters.first_token_buckets[modality], counters.next_token_buckets.get(modality, {})
    return ChatStats(int(max(first.values())), math.nan, *median_and_p99(first), *median_and_p99(following))
