"""Statistics of a run, for summaries and result lines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trimtab.local.counters import ChatStats, chat_stats, median_and_p99
from trimtab.report import series
from trimtab.run_samples import Run
from trimtab_loadtester.results import TOKEN_TIMES, ModalityResults
from trimtab_pipelines.request_outcome import RequestOutcome

LOAD_WINDOW_SECONDS = 5


@dataclass(frozen=True, slots=True)
class RunStats:
    """Statistics of one run; NaN if nothing was measured."""

    received: int
    outcomes: Mapping[str, int]
    slo_fraction: float
    """Share of the requests answered in time; client errors are not counted."""
    expected_accuracy: float
    measured_accuracy: float
    p50_seconds: float
    p99_seconds: float
    mean_cores: float
    max_cores: float
    plan_changes: int
    variant_changes: Mapping[str, int]
    load_low_rps: float
    load_high_rps: float
    client_errors: int = 0
    chats: Mapping[str, ChatStats] = field(default_factory=dict)

    @property
    def accounted(self) -> bool:
        """Whether every request received has exactly one outcome."""
        return self.received == sum(self.outcomes.values())

    @property
    def in_flight(self) -> int:
        """Requests without an outcome at the last sample."""
        return max(self.received - sum(self.outcomes.values()), 0)

    @property
    def load_ratio(self) -> float:
        """Maximum over minimum load, as means over five seconds."""
        return self.load_high_rps / max(self.load_low_rps, 0.2)

    @property
    def accuracy_gap(self) -> float:
        """Absolute difference of expected and measured accuracy."""
        return abs(self.measured_accuracy - self.expected_accuracy)

    def figures(self) -> dict[str, float | int | str | None]:
        return {
            "received_requests": self.received,
            **{f"{name}_requests": count for name, count in self.outcomes.items()},
            "within_slo_fraction": self.slo_fraction,
            "expected_accuracy": self.expected_accuracy,
            "measured_accuracy": self.measured_accuracy,
            "latency_p50_seconds": self.p50_seconds,
            "latency_p99_seconds": self.p99_seconds,
            "mean_cores": self.mean_cores,
            "plan_changes": self.plan_changes,
            **{f"variant_changes_{stage}": count for stage, count in self.variant_changes.items()},
        }


def run_stats(run: Run) -> RunStats:
    reserved, _ = series.cores(run)
    low, high = _load_range(run)
    quantiles = _quantiles(run)
    received, outcomes = _outcomes(run)
    expected, measured = _accuracies(run)
    client_errors = 0 if run.results or not run.samples else run.samples[-1].counters.client_errors
    return RunStats(
        received=received,
        outcomes=outcomes,
        slo_fraction=outcomes.get("ok", 0) / (received - client_errors) if received > client_errors else math.nan,
        expected_accuracy=expected,
        measured_accuracy=measured,
        p50_seconds=quantiles[0],
        p99_seconds=quantiles[1],
        mean_cores=float(reserved.value.mean()) if reserved.value.size else math.nan,
        max_cores=float(reserved.value.max()) if reserved.value.size else math.nan,
        plan_changes=len(run.changes),
        variant_changes=run.variant_changes(),
        load_low_rps=low,
        load_high_rps=high,
        client_errors=client_errors,
        chats=_chats(run),
    )


def _outcomes(run: Run) -> tuple[int, Mapping[str, int]]:
    if run.results is not None:
        counts = {outcome.word: run.results.count(outcome) for outcome in RequestOutcome}
        return len(run.results.records), counts
    if not run.samples:
        return 0, {}
    last = run.samples[-1].counters
    return last.received, dict(last.outcomes)


def _accuracies(run: Run) -> tuple[float, float]:
    if run.results is not None:
        summary = run.results.summary()
        return _number(summary["expected_accuracy"]), _number(summary["measured_accuracy"])
    counters = run.samples[-1].counters if run.samples else None
    if counters is None or not counters.accuracy_count:
        return math.nan, math.nan
    last = run.samples[-1]
    return counters.accuracy_sum / counters.accuracy_count, last.correct / last.total if last.total else math.nan


def _quantiles(run: Run) -> tuple[float, float]:
    if run.results is not None:
        percentiles = run.results.latency_percentiles()
        return percentiles.get("p50", math.nan), percentiles.get("p99", math.nan)
    return median_and_p99(run.samples[-1].counters.latency_buckets if run.samples else {})


def _chats(run: Run) -> dict[str, ChatStats]:
    if run.results is not None:
        return {name: _load_test_chats(modality) for name, modality in run.results.modalities().items()}
    counters = run.samples[-1].counters if run.samples else None
    return {name: chat_stats(counters, name) for name in counters.first_token_buckets} if counters else {}


def _load_test_chats(modality: ModalityResults) -> ChatStats:
    times = [
        modality.tokens.get(f"{column}_{quantile}", math.nan) for column in TOKEN_TIMES for quantile in ("p50", "p99")
    ]
    return ChatStats(modality.answered, modality.slo_fraction, *times)


def _load_range(run: Run) -> tuple[float, float]:
    load = series.observed_load(run).value
    if not load.size:
        return math.nan, math.nan
    width = min(LOAD_WINDOW_SECONDS, load.size)
    smooth = np.convolve(load, np.ones(width) / width, mode="valid")
    return float(smooth.min()), float(smooth.max())


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
