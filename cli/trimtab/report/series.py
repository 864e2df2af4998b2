"""Curves of the report, computed from a run's record. Seconds count from the start of the load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trimtab.local.counters import bucket_increase, quantile_upper_bound
from trimtab.run_samples import Run, Sample, StageSample
from trimtab_loadtester.results import Results
from trimtab_pipelines.request_outcome import RequestOutcome

Floats = NDArray[np.float64]
BINS = 60
MIN_BIN_SECONDS = 1.0
LATE, DROPPED = "answered late", "dropped in "
DECIMALS = 6
"""Precision of accuracies: further digits are noise of the sums."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Values over time: `at` in seconds, `value` with NaN for gaps; both [N]."""

    at: Floats
    value: Floats


@dataclass(frozen=True, slots=True)
class VariantSpan:
    """Time span in which a stage ran the same configuration."""

    start: float
    end: float
    stage: StageSample


def seconds(run: Run) -> float:
    if run.results is not None:
        return run.results.facts.duration_seconds
    return run.samples[-1].at - run.started_at if run.samples else 0.0


def bins(run: Run) -> tuple[Floats, Floats]:
    """Edges and middles of about sixty equal bins over the run, each of at least a second."""
    length = max(seconds(run), MIN_BIN_SECONDS)
    edges = np.linspace(0.0, length, max(int(length / max(length / BINS, MIN_BIN_SECONDS)), 1) + 1)
    return edges, (edges[:-1] + edges[1:]) / 2


def observed_load(run: Run) -> Curve:
    if run.results is None:
        return _growth(run, lambda sample: sample.counters.received)
    edges = np.arange(0.0, np.ceil(seconds(run)) + 1.0)
    counts, _ = np.histogram(run.results.records["scheduled"], edges)
    return Curve(edges[:-1], counts.astype(np.float64))


def planned_load(run: Run) -> tuple[Curve, Sequence[str]]:
    """Peak that each plan was made for, from its time on, and the sources of the forecasts."""
    plans = [plan for plan in run.plans if plan.spec.forecast is not None]
    at = [max(plan.spec.created_at - run.started_at, 0.0) for plan in plans]
    peaks = [plan.spec.forecast.peak_rps for plan in plans if plan.spec.forecast]
    sources = [plan.spec.forecast.source for plan in plans if plan.spec.forecast]
    return Curve(np.array([*at, seconds(run)]), np.array([*peaks, *peaks[-1:]])) if plans else _empty_curve(), sources


def variant_spans(run: Run, stage: str) -> list[VariantSpan]:
    """Time spans with equal variant, batch size and number of replicas of a stage."""
    spans: list[VariantSpan] = []
    end = seconds(run)
    for sample in run.samples:
        at, state = sample.at - run.started_at, sample.stages.get(stage)
        if state is None or at > end + 1.0:
            continue
        at = min(max(at, 0.0), end)
        if spans:
            spans[-1] = replace(spans[-1], end=at)
        if not spans or not _runs_same(spans[-1].stage, state):
            spans.append(VariantSpan(at if spans else 0.0, at, state))
    if spans:
        spans[-1] = replace(spans[-1], end=end)
    return spans


def latencies(run: Run, quantiles: Sequence[float]) -> list[Curve]:
    """Latency quantiles in seconds, one curve each, binned by scheduled arrival."""
    if run.results is None:
        return [_bucket_latency(run, quantile) for quantile in quantiles]
    edges, middles = bins(run)
    answered = run.results.answered
    groups = _grouped(answered["scheduled"], answered["latency_seconds"], edges)
    return [
        Curve(middles, np.array([np.quantile(group, q) if group.size else np.nan for group in groups]))
        for q in quantiles
    ]


def lost_requests(run: Run) -> Mapping[str, Curve]:
    """Requests per bin that were not answered in time, by outcome and reason."""
    if run.results is None:
        return _lost_by_counters(run)
    edges, middles = bins(run)
    arrivals, reasons = run.results.records["scheduled"], np.array(loss_reasons(run.results))
    return {
        reason: Curve(middles, np.histogram(arrivals[reasons == reason], edges)[0].astype(np.float64))
        for reason in sorted(set(reasons.tolist()) - {""})
    }


def loss_reasons(results: Results) -> list[str]:
    """Return for each request the reason why it was not answered in time; empty if it was."""
    reasons = []
    for record in results.records:
        outcome = RequestOutcome(record["outcome"])
        if outcome is RequestOutcome.OK:
            reasons.append("")
        elif outcome is RequestOutcome.DROPPED and record["drop_stage"]:
            reasons.append(f"{DROPPED}{record['drop_stage']}: {record['drop_reason']}")
        elif outcome is RequestOutcome.LATE:
            reasons.append(LATE)
        else:
            reasons.append(f"{outcome.word}: {record['code']}")
    return reasons


def accuracies(run: Run) -> tuple[Curve, Curve]:
    if run.results is None:
        return _expected_by_counters(run), _measured_by_samples(run)
    edges, middles = bins(run)
    answered = run.results.answered
    arrivals = answered["scheduled"]
    expected = [_mean(group) for group in _grouped(arrivals, answered["expected_accuracy"], edges)]
    correct = np.histogram(arrivals, edges, weights=answered["correct"].astype(np.float64))[0]
    total = np.histogram(arrivals, edges, weights=answered["total"].astype(np.float64))[0]
    measured = np.divide(correct, total, out=np.full(correct.size, np.nan), where=total > 0)
    return Curve(middles, np.round(np.array(expected), DECIMALS)), Curve(middles, measured)


def cores(run: Run) -> tuple[Curve, Curve]:
    """Cores reserved by replicas, and cores their processes used."""
    samples = [sample for sample in run.samples if -0.5 <= sample.at - run.started_at <= seconds(run) + 0.5]
    at = np.array([max(sample.at - run.started_at, 0.0) for sample in samples])
    return Curve(at, np.array([s.cores for s in samples])), Curve(at, np.array([s.cores_busy for s in samples]))


def _runs_same(one: StageSample, other: StageSample) -> bool:
    return (one.variant, one.batch_size, one.ready_replicas) == (other.variant, other.batch_size, other.ready_replicas)


def _grouped(at: Floats, values: Floats, edges: Floats) -> list[Floats]:
    bins = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, edges.size - 2)
    return [values[bins == n] for n in range(edges.size - 1)]


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _empty_curve() -> Curve:
    return Curve(np.empty(0), np.empty(0))


def _growth(run: Run, count: Callable[[Sample], float]) -> Curve:
    """Increase of a counter per second between samples; a restarted router counts from zero."""
    at = np.array([sample.at - run.started_at for sample in run.samples])
    counts = np.array([count(sample) for sample in run.samples], dtype=np.float64)
    if at.size < 2:
        return _empty_curve()
    return Curve(at[1:], np.maximum(np.diff(counts), 0.0) / np.maximum(np.diff(at), 1e-3))


def _lost_by_counters(run: Run) -> Mapping[str, Curve]:
    def lost(sample: Sample, reason: str) -> float:
        if reason.startswith(DROPPED):
            return sample.counters.drops.get(reason.removeprefix(DROPPED), 0)
        return sample.counters.outcomes.get("late" if reason == LATE else reason, 0)

    drops = {f"{DROPPED}{name}" for sample in run.samples for name in sample.counters.drops}
    curves = {reason: _growth(run, partial(lost, reason=reason)) for reason in (*drops, LATE, "refused", "failed")}
    return {reason: curve for reason, curve in sorted(curves.items()) if curve.value.any()}


def _expected_by_counters(run: Run) -> Curve:
    totals, counts = (
        _growth(run, lambda s: s.counters.accuracy_sum),
        _growth(run, lambda s: s.counters.accuracy_count),
    )
    value = np.divide(totals.value, counts.value, out=np.full(totals.value.size, np.nan), where=counts.value > 0)
    return Curve(totals.at, np.round(value, DECIMALS))


def _measured_by_samples(run: Run) -> Curve:
    """Share of correct answers, over ten samples each."""
    pairs = [(first, last) for first, last in zip(run.samples, run.samples[10:], strict=False) if last.total]
    shares = [
        (last.correct - first.correct) / (last.total - first.total) if last.total > first.total else np.nan
        for first, last in pairs
    ]
    return Curve(np.array([last.at - run.started_at for _, last in pairs]), np.array(shares, dtype=np.float64))


def _bucket_latency(run: Run, quantile: float) -> Curve:
    """Upper edge of the bucket that holds the quantile, over ten samples each."""
    at, value = [], []
    for first, last in zip(run.samples, run.samples[10:], strict=False):
        answered = bucket_increase(first.counters.latency_buckets, last.counters.latency_buckets)
        at.append(last.at - run.started_at)
        value.append(quantile_upper_bound(answered, quantile))
    return Curve(np.array(at), np.array(value, dtype=np.float64))  # None becomes NaN
