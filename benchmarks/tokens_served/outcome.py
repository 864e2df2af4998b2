"""Results of one load: utility, the paper's four types, and measured and expected accuracy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.results import Results
from trimtab_pipelines.accuracy_evidence import wilson_interval


@dataclass(frozen=True, slots=True)
class Run:
    """A load that was offered.

    Attributes:
        method: who chose.
        results: a record a query, in the order in which they were due.
        deadlines: seconds that each had. Shape (queries,).
        utilities: what each was worth. Shape (queries,).
        busy_share: of a core, what the replica took.
        most_queued: the most rows that were seen waiting.
        mean_queued: mean rows that were seen waiting.
    """

    method: str
    results: Results
    deadlines: NDArray[np.float64]
    utilities: NDArray[np.float64]
    busy_share: float
    most_queued: int
    mean_queued: float

    @property
    def in_time(self) -> NDArray[np.bool_]:
        """Which queries have an answer by their deadline."""
        records = self.results.records
        answered = records["total"] > 0
        found: NDArray[np.bool_] = answered & (records["latency_seconds"] <= self.deadlines)
        return found

    @property
    def utility(self) -> float:
        """Of what was right in time, as labels say."""
        right = self.in_time & (self.results.records["correct"] > 0)
        return float(self.utilities[right].sum())

    @property
    def expected_utility(self) -> float:
        """Of what was in time, by the accuracy that answers promise: free of the luck of single images."""
        promised = np.nan_to_num(self.results.records["expected_accuracy"])
        return float((self.utilities * promised)[self.in_time].sum())

    @property
    def types(self) -> tuple[float, float, float, float]:
        """Shares of all queries: right in time, wrong in time, late, without an answer."""
        records, n = self.results.records, max(len(self.results.records), 1)
        answered, right = records["total"] > 0, records["correct"] > 0
        counts = ((self.in_time & right), (self.in_time & ~right), (answered & ~self.in_time), ~answered)
        first, second, third, fourth = (int(which.sum()) / n for which in counts)
        return first, second, third, fourth

    @property
    def points(self) -> list[str]:
        """The operating point that answered each query; empty for those without an answer."""
        (stage,) = self.results.facts.stages
        return [str(point) for point in self.results.records[f"operating_point:{stage}"]]

    @property
    def missed(self) -> float:
        """Share of the queries without an answer in time."""
        return self.types[2] + self.types[3]

    def accuracy(self) -> tuple[float, float, float]:
        """Measured over all answers, with its 95 % interval."""
        records = self.results.answered
        right, total = int(records["correct"].sum()), int(records["total"].sum())
        return (right / total, *wilson_interval(right, total)) if total else (float("nan"),) * 3

    @property
    def expected_accuracy(self) -> float:
        """As promised, over all answers."""
        told = self.results.answered["expected_accuracy"]
        return float(np.nanmean(told)) if told.size else float("nan")

    def interval(self, resamples: int = 400) -> tuple[float, float]:
        """95 % of utility over queries drawn again (bootstrap)."""
        gained = self.utilities * (self.in_time & (self.results.records["correct"] > 0))
        rng = np.random.default_rng(0)
        sums = [float(rng.choice(gained, gained.size).sum()) for _ in range(resamples)]
        low, high = np.quantile(sums, (0.025, 0.975))
        return float(low), float(high)

    def line(self) -> tuple[str, ...]:
        """A row of the table."""
        accuracy, low, high = self.accuracy()
        low_utility, high_utility = self.interval()
        return (
            self.method,
            str(len(self.results.records)),
            f"{self.utility:.1f} ({low_utility:.0f}–{high_utility:.0f})",
            f"{self.expected_utility:.1f}",
            *(f"{100 * share:.1f} %" for share in self.types),
            f"{accuracy:.3f} ({low:.3f}–{high:.3f})",
            f"{self.expected_accuracy:.3f}",
            f"{self.mean_queued:.0f}/{self.most_queued}",
            f"{self.busy_share:.2f}",
        )


HEADS = (
    "method",
    "queries",
    "utility (95 %)",
    "by promise",
    "type 1",
    "type 2",
    "type 3",
    "type 4",
    "accuracy (95 %)",
    "promised",
    "rows queued, mean/most",
    "replica's cores",
)
