"""Comparison of served and simulated loads: a table, figures, thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.otas.evaluation import Evaluation, Figures, key_of
from benchmarks.otas.measured import Cell, Measured, over_time, quantiles, shares_of
from benchmarks.otas.methods import OTAS, OURS
from benchmarks.tokens_served.outcome import Run
from trimtab_pipelines.result_line import Threshold, threshold

LEAST_QUERIES = 500
HEADS = (
    "load",
    "method",
    "queries",
    "utility (95 %)",
    "by promise",
    "simulated",
    "ours beside it",
    "type 1",
    "type 2",
    "type 3",
    "type 4",
    "accuracy (95 %)",
)


@dataclass(frozen=True, slots=True)
class Served:
    """A load that a method was asked, and the same one simulated."""

    cell: Cell
    run: Run
    simulated: Measured

    @property
    def measured(self) -> Measured:
        """What came of it, as of cells that are simulated."""
        records, points = self.run.results.records, self.run.points
        promised = records["expected_accuracy"][self.run.in_time]
        return Measured(
            cell=self.cell,
            queries=len(records),
            utility=self.run.utility,
            types=self.run.types,
            shares=shares_of(points),
            over_time=over_time(records["scheduled"], points),
            accuracies=quantiles(promised[~np.isnan(promised)]),
        )


@dataclass(frozen=True)
class Beside:
    """All that was served.

    Attributes:
        served: each load by each method.
        capacity_rps: queries a second of the plain point on this machine.
        scale: what the paper's rates were multiplied by.
        points: of the transformer, the fastest first.
    """

    served: Sequence[Served]
    capacity_rps: float
    scale: float
    points: Sequence[str]

    @cached_property
    def evaluation(self) -> Evaluation:
        """The same as cells."""
        return Evaluation([one.measured for one in self.served], (), "as simulated")

    @property
    def methods(self) -> list[str]:
        """Who was served, ours first."""
        return list(dict.fromkeys(one.cell.method for one in self.served))

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table, one a load and method, load by load."""
        loads = self.evaluation.workloads
        return [self._row(one) for one in sorted(self.served, key=lambda one: loads.index(one.cell.workload))]

    def _row(self, one: Served) -> tuple[str, ...]:
        run, (workload, method) = one.run, (one.cell.workload, one.cell.method)
        (low_utility, high_utility), (accuracy, low, high) = run.interval(), run.accuracy()
        return (
            workload,
            method,
            str(len(run.results.records)),
            f"{run.utility:.1f} ({low_utility:.0f}–{high_utility:.0f})",
            f"{run.expected_utility:.1f}",
            f"{one.simulated.utility:.1f}",
            f"{100 * self.evaluation.gain(workload, method):+.1f} %" if method != OURS else "",
            *(f"{100 * share:.2f} %" for share in run.types),
            f"{accuracy:.3f} ({low:.3f}–{high:.3f})",
        )

    def figures(self) -> Figures:
        """For the line of JSON."""
        found: Figures = {"served_plain_rps": self.capacity_rps, "served_times_the_papers_load": self.scale}
        for one in self.served:
            key = f"served_{one.cell.workload}_{key_of(one.cell.method)}"
            low, high = one.run.interval()
            found |= {
                f"{key}_queries": len(one.run.results.records),
                f"{key}_utility": one.run.utility,
                f"{key}_utility_95": f"{low:.1f}–{high:.1f}",
                f"{key}_utility_by_promise": one.run.expected_utility,
                f"{key}_utility_simulated": one.simulated.utility,
                **{f"{key}_type_{number}": share for number, share in enumerate(one.run.types, 1)},
            }
            if one.cell.method != OURS:
                gain = self.evaluation.gain(one.cell.workload, one.cell.method)
                found[f"served_{one.cell.workload}_gain_over_{key_of(one.cell.method)}"] = gain
        return found

    def bars(self) -> tuple[Threshold, ...]:
        """The simulator's, of what was served."""
        rivals = [method for method in self.methods if method not in {OURS, OTAS}]
        return (
            threshold("served: utility over OTAS as printed in any load, least, %", self._least([OTAS]), ">=", 1e-9),
            threshold("served: utility over the other methods in any load, least, %", self._least(rivals), ">=", 1e-9),
            threshold("served: queries by each method, least", self._fewest(), ">=", LEAST_QUERIES),
        )

    def _least(self, rivals: Sequence[str]) -> float:
        workloads = self.evaluation.workloads
        return min(100 * self.evaluation.gain(workload, rival) for workload in workloads for rival in rivals)

    def _fewest(self) -> int:
        return min(len(one.run.results.records) for one in self.served)
