"""Results of one load: violations, accuracy of the responses, and CPU time of each process."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab_loadtester.results import Results
from trimtab_pipelines.accuracy_evidence import wilson_interval
from trimtab_pipelines.request_outcome import RequestOutcome

SLACK = 1e-3
"""Accuracies are told to four digits."""


@dataclass(frozen=True, slots=True)
class Run:
    """A load that was offered.

    Attributes:
        method: who chose.
        jobs_rps: offered.
        results: a record a job.
        busy: cores that each process took.
        seed: of the load.
    """

    method: str
    jobs_rps: float
    results: Results
    busy: Mapping[str, float]
    seed: int

    @property
    def jobs(self) -> int:
        """How many there were."""
        return len(self.results.records)

    @property
    def violations(self) -> float:
        """Share of jobs without an answer in time; one below its floor in expectation counts as none."""
        return 1.0 - self._met() / max(self.jobs, 1)

    @property
    def late(self) -> float:
        """Share of jobs without an answer in time, whatever its accuracy."""
        return 1.0 - self.results.count(RequestOutcome.OK) / max(self.jobs, 1)

    @property
    def dropped(self) -> int:
        """Jobs that got no answer at all."""
        return self.jobs - len(self.results.answered)

    @property
    def answered_rows_rps(self) -> float:
        """Rows a second whose jobs violated nothing."""
        records = self.results.records
        return float(records["total"][self._in_order()].sum() / self.results.facts.duration_seconds)

    @property
    def expected(self) -> float:
        """Mean accuracy that the answers say they have, by rows."""
        told = self.results.answered
        return float(np.average(told["expected_accuracy"], weights=told["total"])) if len(told) else float("nan")

    def accuracy(self, distinct_rows: int) -> tuple[float, float, float]:
        """Measured accuracy of all answers and its 95 % interval, where so many rows take turns."""
        told = self.results.answered
        return _measured(int(told["correct"].sum()), int(told["total"].sum()), distinct_rows)

    def provisional(self, distinct_rows: int) -> tuple[int, float, float, float]:
        """How many rows have an answer from before their second look, and their measured accuracy with interval."""
        told = self.results.answered
        rows = int(told["escalation_pending"].sum())
        return rows, *_measured(int(told["escalation_pending_correct"].sum()), rows, distinct_rows)

    @property
    def batch_rows(self) -> float:
        """Mean rows of a batch, over batches."""
        sizes = self.results.answered["batch_size:name"]
        sizes = sizes[sizes > 0]
        return float(sizes.size / (1.0 / sizes).sum()) if sizes.size else float("nan")

    def line(self, distinct_rows: int) -> tuple[str, ...]:
        """A row of the table."""
        accuracy, low, high = self.accuracy(distinct_rows)
        rows, known, *_ = self.provisional(distinct_rows)
        latency = self.results.latency_percentiles()
        return (
            self.method,
            f"{self.jobs_rps:.0f}",
            str(self.jobs),
            f"{100 * self.violations:.2f} %",
            f"{100 * self.late:.2f} %",
            str(self.dropped),
            f"{accuracy:.4f} ({low:.3f}–{high:.3f})",
            f"{self.expected:.4f}",
            f"{rows} ({known:.3f})" if rows else "0",
            f"{1e3 * latency.get('p50', 0.0):.0f}/{1e3 * latency.get('p99', 0.0):.0f}",
            f"{self.batch_rows:.0f}",
            " ".join(f"{name} {share:.2f}" for name, share in self.busy.items()),
        )

    def _met(self) -> int:
        return int(self._in_order().sum())

    def _in_order(self) -> np.ndarray:
        records = self.results.records
        floors = np.nan_to_num(records["floor"])
        found: np.ndarray = (records["outcome"] == RequestOutcome.OK) & (records["expected_accuracy"] >= floors - SLACK)
        return found


HEADS = (
    "method",
    "jobs/s",
    "jobs",
    "violated",
    "not in time",
    "no answer",
    "measured accuracy (95 %)",
    "expected",
    "provisional rows (accuracy)",
    "p50/p99 ms",
    "rows a batch",
    "cores",
)


def _measured(right: int, rows: int, distinct_rows: int) -> tuple[float, float, float]:
    if not rows:
        return float("nan"), float("nan"), float("nan")
    n = min(rows, distinct_rows)
    return right / rows, *wilson_interval(right / rows * n, n)
