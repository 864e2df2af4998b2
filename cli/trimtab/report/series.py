"""The curves of the report, computed from a run's record. Pure; seconds count from the start of the load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.run_samples import Run, Sample, StageSample
from trimtab_loadtester.results import Results
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.request_outcome import RequestOutcome

Floats = NDArray[np.float64]
BINS = 60
LEAST_BIN_SECONDS = 1.0
LATE = "answered late"
DECIMALS = 6
"""Of accuracies: what lies below is noise of the sums they come from."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Values over time: `at` in seconds, `value` with NaN where there is none; both [N]."""

    at: Floats
    value: Floats


@dataclass(frozen=True, slots=True)
class VariantSpan:
    """A time in which a stage ran the same."""

    start: float
    end: float
    stage: StageSample


def seconds(run: Run) -> float:
    """How long the run's curves are."""
    if run.results is not None:
        return run.results.facts.duration_seconds
    return run.samples[-1].at - run.started_at if run.samples else 0.0


def bin_edges(run: Run) -> Floats:
    """Edges of equal bins over the run, about sixty, each of at least a second."""
    length = max(seconds(run), LEAST_BIN_SECONDS)
    return np.linspace(0.0, length, max(int(length / max(length / BINS, LEAST_BIN_SECONDS)), 1) + 1)


def observed_load(run: Run) -> Curve:
    """Requests per second, second by second."""
    if run.results is None:
        return _growth(run, lambda sample: sample.counters.received)
    edges = np.arange(0.0, np.ceil(seconds(run)) + 1.0)
    counts, _ = np.histogram(run.results.records["scheduled"], edges)
    return Curve(edges[:-1], counts.astype(np.float64))


def planned_load(run: Run) -> tuple[Curve, Sequence[str]]:
    """The peak each decision planned for, from its time on, and where the forecast came from."""
    plans = [plan for plan in run.plans if plan.spec.forecast is not None]
    at = [max(plan.spec.created_at - run.started_at, 0.0) for plan in plans]
    peaks = [plan.spec.forecast.peak_rps for plan in plans if plan.spec.forecast]
    sources = [plan.spec.forecast.source for plan in plans if plan.spec.forecast]
    return Curve(np.array([*at, seconds(run)]), np.array([*peaks, *peaks[-1:]])) if plans else _nothing(), sources


def stretches(run: Run, stage: str) -> list[VariantSpan]:
    """When a stage ran what, as the router saw it."""
    found: list[VariantSpan] = []
    end = seconds(run)
    for sample in run.samples:
        at, seen = sample.at - run.started_at, sample.stages.get(stage)
        if seen is None or at > end + 1.0:
            continue
        at = min(max(at, 0.0), end)
        if found and _same(found[-1].stage, seen):
            found[-1] = VariantSpan(found[-1].start, at, found[-1].stage)
        else:
            if found:
                found[-1] = VariantSpan(found[-1].start, at, found[-1].stage)
            found.append(VariantSpan(at if found else 0.0, at, seen))
    if found:
        found[-1] = VariantSpan(found[-1].start, end, found[-1].stage)
    return found


def latencies(run: Run, quantiles: Sequence[float]) -> list[Curve]:
    """Latency of the answers whose requests were due in each bin, one curve a quantile, in seconds."""
    edges = bin_edges(run)
    if run.results is None:
        return [_bucket_latency(run, quantile) for quantile in quantiles]
    answered = run.results.answered
    groups = _grouped(answered["scheduled"], answered["latency_seconds"], edges)
    middles = (edges[:-1] + edges[1:]) / 2
    return [
        Curve(middles, np.array([np.quantile(group, q) if group.size else np.nan for group in groups]))
        for q in quantiles
    ]


def lost(run: Run) -> Mapping[str, Curve]:
    """Requests per bin that ended in another way than in time, by what became of them and why."""
    if run.results is None:
        return _lost_by_counters(run)
    edges, records = bin_edges(run), run.results.records
    curves = {}
    for reason in sorted(set(reasons(run.results)) - {""}):
        due = records["scheduled"][np.array(reasons(run.results)) == reason]
        curves[reason] = Curve((edges[:-1] + edges[1:]) / 2, np.histogram(due, edges)[0].astype(np.float64))
    return curves


def reasons(results: Results) -> list[str]:
    """Say for each request why it was not answered in time; empty where it was."""
    words = []
    for record in results.records:
        outcome = RequestOutcome(record["outcome"])
        if outcome is RequestOutcome.OK:
            words.append("")
        elif outcome is RequestOutcome.DROPPED and record["drop_stage"]:
            words.append(f"dropped in {record['drop_stage']}: {record['drop_reason']}")
        elif outcome is RequestOutcome.LATE:
            words.append(LATE)
        else:
            words.append(f"{outcome.word}: {record['code']}")
    return words


def accuracies(run: Run) -> tuple[Curve, Curve]:
    """Expected and measured accuracy of the answers, per bin."""
    edges = bin_edges(run)
    middles = (edges[:-1] + edges[1:]) / 2
    if run.results is None:
        return _expected_by_counters(run), _measured_by_samples(run)
    answered = run.results.answered
    due = answered["scheduled"]
    expected = [_mean(group) for group in _grouped(due, answered["expected_accuracy"], edges)]
    right = np.histogram(due, edges, weights=answered["correct"].astype(np.float64))[0]
    total = np.histogram(due, edges, weights=answered["total"].astype(np.float64))[0]
    measured = np.divide(right, total, out=np.full(right.size, np.nan), where=total > 0)
    return Curve(middles, np.round(np.array(expected), DECIMALS)), Curve(middles, measured)


def cores(run: Run) -> tuple[Curve, Curve]:
    """Cores reserved by replicas, and cores their processes used."""
    shown = [sample for sample in run.samples if -0.5 <= sample.at - run.started_at <= seconds(run) + 0.5]
    at = np.array([max(sample.at - run.started_at, 0.0) for sample in shown])
    return Curve(at, np.array([s.cores for s in shown])), Curve(at, np.array([s.cores_busy for s in shown]))


def change_rows(run: Run) -> list[tuple[float, PipelinePlan]]:
    """The decisions that changed what runs, with their time."""
    return [(plan.spec.created_at - run.started_at, plan) for plan in run.changes]


def _same(one: StageSample, other: StageSample) -> bool:
    return (one.variant, one.batch_size, one.ready_replicas) == (other.variant, other.batch_size, other.ready_replicas)


def _grouped(at: Floats, values: Floats, edges: Floats) -> list[Floats]:
    place = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, edges.size - 2)
    return [values[place == n] for n in range(edges.size - 1)]


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _nothing() -> Curve:
    return Curve(np.empty(0), np.empty(0))


def _growth(run: Run, count: Callable[[Sample], float]) -> Curve:
    """How much a counter grew per second from sample to sample; a restarted router counts from zero."""
    at = np.array([sample.at - run.started_at for sample in run.samples])
    counts = np.array([count(sample) for sample in run.samples], dtype=np.float64)
    if at.size < 2:
        return _nothing()
    return Curve(at[1:], np.maximum(np.diff(counts), 0.0) / np.maximum(np.diff(at), 1e-3))


def _lost_by_counters(run: Run) -> Mapping[str, Curve]:
    names = {name for sample in run.samples for name in sample.counters.drops}
    curves = {f"dropped in {name}": _growth(run, _drops_at(name)) for name in names}
    for outcome, words in (("late", LATE), ("refused", "refused"), ("failed", "failed")):
        curves[words] = _growth(run, _outcomes_of(outcome))
    return {name: curve for name, curve in sorted(curves.items()) if curve.value.any()}


def _drops_at(name: str) -> Callable[[Sample], float]:
    return lambda sample: sample.counters.drops.get(name, 0)


def _outcomes_of(outcome: str) -> Callable[[Sample], float]:
    return lambda sample: sample.counters.outcomes.get(outcome, 0)


def _expected_by_counters(run: Run) -> Curve:
    totals, counts = (
        _growth(run, lambda s: s.counters.accuracy_sum),
        _growth(run, lambda s: s.counters.accuracy_count),
    )
    value = np.divide(totals.value, counts.value, out=np.full(totals.value.size, np.nan), where=counts.value > 0)
    return Curve(totals.at, np.round(value, DECIMALS))


def _measured_by_samples(run: Run) -> Curve:
    """The share of right answers, over ten samples each."""
    pairs = [(first, last) for first, last in zip(run.samples, run.samples[10:], strict=False) if last.total]
    shares = [
        (last.correct - first.correct) / (last.total - first.total) if last.total > first.total else np.nan
        for first, last in pairs
    ]
    return Curve(np.array([last.at - run.started_at for _, last in pairs]), np.array(shares, dtype=np.float64))


def _bucket_latency(run: Run, quantile: float) -> Curve:
    """The upper edge of the bucket the quantile fell into, over ten samples each."""
    at, value = [], []
    for first, last in zip(run.samples, run.samples[10:], strict=False):
        edges = sorted(last.counters.latency_buckets)
        grown = np.array([last.counters.latency_buckets[e] - first.counters.latency_buckets.get(e, 0.0) for e in edges])
        at.append(last.at - run.started_at)
        known = grown.size and grown[-1] > 0
        value.append(edges[int(np.searchsorted(grown, quantile * grown[-1]))] if known else np.nan)
    return Curve(np.array(at), np.array(value))
