"""Comparison of served and simulated runs of the same jobs, and its thresholds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.modalities.run import Run
from benchmarks.modalities.setting import POOL, STAGE, VARIANT
from benchmarks.mosel.cells import OURS, Cell, Measured
from benchmarks.mosel.evaluation import Evaluation
from trimtab_adapter.simulation.environment import Environment
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

MODEL = "digits-av"
MOSEL, PLAIN = "Mosel", "AllModalities"
METHODS = (OURS, MOSEL, PLAIN, "Aggressive", "Random")
MOST_WORSE_POINTS = 1.0
"""That one run may differ from another by chance."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A cell served and simulated.

    Attributes:
        served: what came of it there.
        simulated: what came of the same jobs here.
        expected: accuracy of the served rows, as their answers tell it.
        right: the share of them that was named rightly, with a 95 % interval.
    """

    served: Measured
    simulated: Measured
    expected: float
    right: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Beside:
    """All that was served.

    Attributes:
        pairs: one a policy and load.
        trace: what the load is.
        carried_rps: rows a second that all senses carried, before all else.
        speed: what batches took then over what the profile says; plans stand on the profile times this.
        cores: that the replica had.
        is_held: whether it was held to them.
        conditions: of the machine, by load: what the simulator was told of it.
        items: what the rows were made of.
        lost: cells whose router hung or ended and was replaced, which is not the policy's doing.
    """

    pairs: Sequence[Pair]
    trace: str
    carried_rps: float
    speed: float
    cores: float
    is_held: bool
    conditions: Mapping[float, Environment]
    items: str
    lost: int = 0

    @property
    def ratios(self) -> Mapping[float, float]:
        """What batches took over what plans stood on, by load."""
        return {load: one.service_ratios[STAGE, VARIANT] for load, one in self.conditions.items()}

    @property
    def served(self) -> Evaluation:
        """The served cells."""
        return Evaluation([pair.served for pair in self.pairs], self.trace)

    @property
    def simulated(self) -> Evaluation:
        """The simulated ones."""
        return Evaluation([pair.simulated for pair in self.pairs], self.trace)


def served_measures(cell: Cell, run: Run) -> Measured:
    """What a served load says of a cell; how often each subset was chosen, answers do not say by the load."""
    records, answered = run.results.records, run.results.answered
    in_time = records["outcome"] == RequestOutcome.OK
    return Measured(
        cell=cell,
        jobs=run.jobs,
        violations=run.late,
        met=1.0 - run.violations,
        accuracy=float(answered["expected_accuracy"].mean()) if len(answered) else float("nan"),
        answered_rps=float(records["total"][in_time].sum() / run.results.facts.duration_seconds),
        mean_seconds=float(answered["latency_seconds"].mean()) if len(answered) else float("nan"),
        provisional=float((records["escalation_pending"] > 0).mean()),
        again=float("nan"),
        shares={},
    )


def paired(run: Run, simulated: Measured) -> Pair:
    """A served load and what the simulator says of its jobs."""
    return Pair(served_measures(simulated.cell, run), simulated, run.expected, run.accuracy(POOL))


def judged(beside: Beside) -> tuple[dict[str, float | int | str | None], list[Threshold]]:
    """Figures and bars of what was served."""
    served, simulated = beside.served, beside.simulated
    figures: dict[str, float | int | str | None] = {
        "served_recordings": beside.items,
        "served_cores": beside.cores,
        "served_replica_held_to_its_cores": int(beside.is_held),
        "served_all_senses_carry_rows_rps": beside.carried_rps,
        "served_batches_over_profile": beside.speed,
        "served_jobs": sum(pair.served.jobs for pair in beside.pairs),
    }
    for method in METHODS:
        for name, evaluation in (("served", served), ("simulated", simulated)):
            figures |= {
                f"{name}_{method.lower()}_{what}": evaluation.mean(MODEL, method, of)
                for what, of in (
                    ("violations", lambda one: one.violations),
                    ("met", lambda one: one.met),
                    ("completion_seconds", lambda one: one.mean_seconds),
                )
            }
            figures[f"{name}_{method.lower()}_carried_rows_rps"] = evaluation.carried_rps(MODEL, method)
    for load, ratio in beside.ratios.items():
        figures[f"served_batches_over_planned_at_load_{load:g}"] = ratio
    worse = 100 * (_mean(served, OURS, "violations") - _mean(served, MOSEL, "violations"))
    more = 100 * (_mean(served, OURS, "met") - _mean(served, MOSEL, "met"))
    figures["served_violations_off_simulated_points"] = 100 * _off(beside)
    bars = [
        threshold("served: loads in which a router was lost", beside.lost, "==", 0),
        threshold("served: violations of ours beyond MOSEL's, points", worse, "<=", MOST_WORSE_POINTS),
        threshold("served: jobs that met both SLOs with ours beyond MOSEL's, points", more, ">=", -MOST_WORSE_POINTS),
    ]
    return figures, bars


def with_served(outcome: ResultLine, beside: Beside) -> ResultLine:
    """What is judged of the simulated models, and of what was served."""
    figures, bars = judged(beside)
    return ResultLine(name=outcome.name, figures={**outcome.figures, **figures}, bars=(*outcome.bars, *bars))


def _mean(evaluation: Evaluation, method: str, what: str) -> float:
    return evaluation.mean(MODEL, method, lambda one: float(getattr(one, what)))


def _off(beside: Beside) -> float:
    return float(np.mean([abs(pair.served.violations - pair.simulated.violations) for pair in beside.pairs]))
