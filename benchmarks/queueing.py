"""Is the planner's estimate of a stage's latency true? Planned against simulated p99. The last line is JSON.

Single stages with service times s + p·b, at several loads, batch sizes and numbers of replicas, under Poisson arrivals.
A plan that promises too little latency breaks its SLO; one that promises far too much wastes what the SLO allows.
"""

import itertools
import sys
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from tests.builders import a_pipeline, a_plan, a_point_profile, a_profile
from trimtab.options import console
from trimtab_adapter.planning.latency import backlog_seconds, planned_seconds
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_pipelines.result_line import ResultLine, threshold

QUANTILE = 0.99
SERVICE = {"fixed": (0.100, 0.005), "linear": (0.010, 0.050)}
"""Seconds of a batch beside and per row: one law that gains much by batches, one that gains little."""
BATCHES, REPLICAS, UTILISATIONS = (1, 4, 16), (1, 2, 8), (0.3, 0.6, 0.8, 0.9)
REQUESTS = 6000


@dataclass(frozen=True, slots=True)
class Case:
    """One stage: its law, batch size, replicas and the share of its saturated throughput that is offered."""

    law: str
    batch: int
    replicas: int
    utilisation: float

    @property
    def service_seconds(self) -> float:
        """Seconds of a full batch."""
        constant, linear = SERVICE[self.law]
        return constant + linear * self.batch

    @property
    def throughput_rps(self) -> float:
        """Rows per second of all replicas, saturated."""
        return self.replicas * self.batch / self.service_seconds

    def planned_seconds(self) -> float:
        """What the planner takes its p99 to be."""
        backlog = backlog_seconds(self.utilisation * self.throughput_rps, self.throughput_rps, QUANTILE)
        return planned_seconds(self.service_seconds, self.replicas, backlog, QUANTILE)

    def simulated_seconds(self) -> float:
        """Its p99 in the simulator, nothing dropped."""
        pipeline = a_pipeline(dropPolicy="Never", slo={"latency": "1000s"}, budget={"cores": "64"})
        load_rps = self.utilisation * self.throughput_rps
        seconds = int(REQUESTS / load_rps) + 1
        scenario = Scenario(
            pipeline=pipeline,
            profiles={"stage-0": a_profile("stage-0", [a_point_profile("small", *SERVICE[self.law])])},
            arrivals_seconds=poisson_arrivals(np.full(seconds, load_rps), seed=1),
            duration_seconds=float(seconds),
            plan=a_plan(pipeline, batchSize=self.batch, replicas=self.replicas),
            environment=Environment(spread=0.0),
        )
        return simulate(scenario).latency(QUANTILE)


def main() -> int:
    """Compare all cases; 1 where a bar is missed."""
    cases = [Case(*sides) for sides in itertools.product(SERVICE, BATCHES, REPLICAS, UTILISATIONS)]
    ratios = [case.planned_seconds() / case.simulated_seconds() for case in cases]
    table = Table("law", "batch", "replicas", *(f"at {share:.0%}" for share in UTILISATIONS), box=None, pad_edge=False)
    for n in range(0, len(cases), len(UTILISATIONS)):
        case = cases[n]
        shown = (f"{ratio:.2f}" for ratio in ratios[n : n + len(UTILISATIONS)])
        table.add_row(case.law, str(case.batch), str(case.replicas), *shown)
    console.print("planned over simulated p99, by the share of the saturated throughput that is offered")
    console.print(table)
    figures = {
        "cases": len(cases),
        "ratio_least": min(ratios),
        "ratio_median": float(np.median(ratios)),
        "ratio_greatest": max(ratios),
    }
    safe = float(np.mean([ratio >= 0.95 for ratio in ratios]))
    bars = (
        threshold("share of cases planned with at least 95 % of the simulated p99", safe, ">=", 0.95),
        threshold("median of planned over simulated p99", float(np.median(ratios)), "<=", 1.5),
    )
    outcome = ResultLine(name="bench-queueing", figures=figures, bars=bars)
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
