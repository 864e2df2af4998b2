"""Samples of a run, one each second: the data of the terminal view and of the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from trimtab.local.counters import Counters, bucket_increase, quantile_upper_bound
from trimtab.local.supervisor import Fault
from trimtab_loadtester.results import Results
from trimtab_pipelines.jsonl import read_lines
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import InferencePipeline


@dataclass(frozen=True, slots=True)
class StageSample:
    """State of one stage."""

    variant: str
    batch_size: int
    ready_replicas: int
    queue_rows: int


def stage_samples(states: Sequence[RouterState]) -> dict[str, StageSample]:
    """Combine routers: variants of the first, the maximum of replicas, the sum of queued rows."""
    return {
        name: StageSample(
            stage.variant,
            stage.batch_size,
            max(state.stages[name].ready_replicas for state in states if name in state.stages),
            sum(state.stages[name].queue_rows for state in states if name in state.stages),
        )
        for name, stage in states[0].stages.items()
    }


@dataclass(frozen=True, slots=True)
class Sample:
    """State of a run at one moment."""

    at: float
    """Unix time."""
    stages: Mapping[str, StageSample]
    cores: float
    """Cores reserved by all replicas."""
    cores_busy: float
    """Cores used by the replicas' processes since the previous sample."""
    counters: Counters
    correct: int = 0
    """Correct answers of the load so far."""
    total: int = 0
    """Answers of the load so far that have a label."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run, or what is recorded of one so far."""

    title: str
    pipeline: InferencePipeline
    samples: Sequence[Sample]
    plans: Sequence[PipelinePlan]
    """Every plan, oldest first."""
    results: Results | None = None
    """Results of the load tester; None if the load came from elsewhere."""
    faults: Sequence[Fault] = ()
    ready_seconds: float = 0.0
    """Seconds from the start until the first plan was in force."""

    @property
    def started_at(self) -> float:
        """Unix time of second 0 of the report."""
        if self.results is not None:
            return self.results.facts.started_at
        return self.samples[0].at if self.samples else 0.0

    @property
    def changes(self) -> Sequence[PipelinePlan]:
        """Plans that differ from the previous plan in what a stage runs."""
        return [after for before, after in pairwise(self.plans) if stage_summaries(before) != stage_summaries(after)]

    def variant_changes(self) -> dict[str, int]:
        """Count the changes of variant during the load, by stage."""
        end = self.started_at + self.results.facts.duration_seconds if self.results else float("inf")
        during = [sample for sample in self.samples if self.started_at - 1.0 <= sample.at <= end + 1.0]
        counts = {}
        for stage in self.pipeline.spec.ordered_stages:
            variants = [sample.stages[stage.name].variant for sample in during if stage.name in sample.stages]
            counts[stage.name] = sum(a != b for a, b in pairwise(variants))
        return counts


def stage_summaries(plan: PipelinePlan) -> dict[str, str]:
    """Describe in a few words what each stage runs."""
    return {
        stage.name: " + ".join(f"{group.variant} ×{group.replicas}" for group in stage.groups)
        + f" batch {stage.batch_size}"
        + ("" if stage.operating_point == "default" else f" {stage.operating_point}")
        for stage in plan.spec.stages
    }


def read_decisions(path: Path, max_plans: int | None = None) -> list[PipelinePlan]:
    """Read the plans that the adapter recorded, thinned to at most `max_plans`; a truncated line is skipped."""
    return read_lines(path, PipelinePlan.model_validate_json, max_plans)


@dataclass(slots=True)
class SampleWindow:
    """Samples of the last seconds."""

    seconds: float = 10.0
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        while self.samples[0].at < sample.at - self.seconds:
            self.samples.pop(0)

    @property
    def rps(self) -> float:
        """Requests received per second."""
        first, last = self.samples[0], self.samples[-1]
        return max(last.counters.received - first.counters.received, 0) / max(last.at - first.at, 1e-3)

    def latency_seconds(self, quantile: float) -> float | None:
        """Upper bound of a latency quantile; None without answers."""
        return self._quantile(lambda counters: counters.latency_buckets, quantile)

    def first_token_seconds(self, modality: str, quantile: float) -> float | None:
        """Upper bound of a quantile of the time to first token."""
        return self._quantile(lambda counters: counters.first_token_buckets.get(modality, {}), quantile)

    def next_token_seconds(self, modality: str, quantile: float) -> float | None:
        """Upper bound of a quantile of the time between tokens."""
        return self._quantile(lambda counters: counters.next_token_buckets.get(modality, {}), quantile)

    def _quantile(self, buckets: Callable[[Counters], Mapping[float, float]], quantile: float) -> float | None:
        first, last = self.samples[0].counters, self.samples[-1].counters
        return quantile_upper_bound(bucket_increase(buckets(first), buckets(last)), quantile)
