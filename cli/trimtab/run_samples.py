"""What was seen of a run, second by second: the data of the live table and of the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from trimtab.local.router_client import Counters, quantile_upper_bound
from trimtab.local.supervisor import Fault
from trimtab_loadtester.results import Results
from trimtab_pipelines.jsonl import read_lines
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline


@dataclass(frozen=True, slots=True)
class StageSample:
    """One stage at one moment, as the router sees it."""

    variant: str
    batch_size: int
    ready_replicas: int
    queue_rows: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything at one moment, a Unix time.

    Attributes:
        at: when.
        stages: by name.
        cores: reserved by all replicas.
        cores_busy: what the replicas' processes used since the sample before.
        counters: the router's.
        correct, total: of the load's answers that could be compared with the truth, so far.
    """

    at: float
    stages: Mapping[str, StageSample]
    cores: float
    cores_busy: float
    counters: Counters
    correct: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run.

    Attributes:
        title: what it is called where runs are compared.
        pipeline: what was served.
        samples: about one a second.
        plans: every decision, oldest first.
        results: what the load tester recorded; None where others sent the load.
        faults: what ended unasked, replicas and processes.
        ready_seconds: from the start to the first plan being true.
    """

    title: str
    pipeline: InferencePipeline
    samples: Sequence[Sample]
    plans: Sequence[PipelinePlan]
    results: Results | None = None
    faults: Sequence[Fault] = ()
    ready_seconds: float = 0.0

    @property
    def started_at(self) -> float:
        """Unix time of second 0 of everything shown."""
        if self.results is not None:
            return self.results.facts.started_at
        return self.samples[0].at if self.samples else 0.0

    @property
    def changes(self) -> Sequence[PipelinePlan]:
        """The plans in which something a stage runs differs from the plan before; the first is not a change."""
        return [after for before, after in pairwise(self.plans) if stage_summaries(before) != stage_summaries(after)]

    def variant_changes(self) -> dict[str, int]:
        """Count for each stage how often the router moved to another variant during the load."""
        end = self.started_at + self.results.facts.duration_seconds if self.results else float("inf")
        during = [sample for sample in self.samples if self.started_at - 1.0 <= sample.at <= end + 1.0]
        counts = {}
        for stage in self.pipeline.spec.ordered_stages:
            seen = [sample.stages[stage.name].variant for sample in during if stage.name in sample.stages]
            counts[stage.name] = sum(a != b for a, b in pairwise(seen))
        return counts


def stage_summaries(plan: PipelinePlan) -> dict[str, str]:
    """Say in a few words what each stage runs."""
    return {
        stage.name: f"{stage.variant} ×{stage.replicas} batch {stage.batch_size}"
        + ("" if stage.operating_point == "default" else f" {stage.operating_point}")
        for stage in plan.spec.stages
    }


def read_decisions(path: Path, most: int | None = None) -> list[PipelinePlan]:
    """Read the adapter's journal; a line that was torn is left out. Of more than `most`, the newest and some others."""
    return read_lines(path, PipelinePlan.model_validate_json, most)


@dataclass(slots=True)
class SampleWindow:
    """The samples of the last seconds, for what is happening now."""

    seconds: float = 10.0
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Take the newest; forget what is too old."""
        self.samples.append(sample)
        while self.samples[0].at < sample.at - self.seconds:
            self.samples.pop(0)

    @property
    def rps(self) -> float:
        """Requests received per second."""
        first, last = self.samples[0], self.samples[-1]
        return max(last.counters.received - first.counters.received, 0) / max(last.at - first.at, 1e-3)

    def latency_seconds(self, quantile: float) -> float | None:
        """The latency that this share of the answers did not pass, to the edge of its bucket; None without answers."""
        return quantile_upper_bound(self._grown(lambda counters: counters.latency_buckets), quantile)

    def first_seconds(self, modality: str, quantile: float) -> float | None:
        """The same of the time until chats of a modality began to be answered."""
        return quantile_upper_bound(
            self._grown(lambda counters: counters.first_token_buckets.get(modality, {})), quantile
        )

    def next_seconds(self, modality: str, quantile: float) -> float | None:
        """The same of the time between two pieces of their answers."""
        return quantile_upper_bound(
            self._grown(lambda counters: counters.next_token_buckets.get(modality, {})), quantile
        )

    def _grown(self, buckets_of: Callable[[Counters], Mapping[float, float]]) -> dict[float, float]:
        first, last = buckets_of(self.samples[0].counters), buckets_of(self.samples[-1].counters)
        return {edge: count - first.get(edge, 0.0) for edge, count in last.items()}
