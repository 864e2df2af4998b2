"""Integer program: one option to choose per stage under a latency SLO, a budget and an accuracy floor.

`planning.program_builder` builds it from a pipeline, and `solvers` solve it. Replicas are fixed inside each option, so
the problem is a multiple-choice knapsack over a DAG (IPA, section 4.2, eq. 5–10).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from trimtab_pipelines.accuracy import pipeline_accuracy
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.plan import ReplicaGroupPlan
from trimtab_pipelines.row_shares import AnsweredBy
from trimtab_pipelines.spec import Objective

TOLERANCE = 1e-9
"""Differences of cores and seconds below this are rounding errors."""
COST = 2
"""Index of the cost in `Program.limits`."""
TIE_BREAK = 1e-6
"""Weight of what a goal does not ask for, relative to what it asks for."""


class Option(NamedTuple):
    """One way to run a stage. Cores, GPUs and cost an hour are those of all its replicas together."""

    variant: str
    operating_point: str
    batch_size: int
    replicas: int
    cores: float
    gpus: int
    cost: float
    accuracy: float
    value: float
    """What the accuracy metric combines: the accuracy, or its rank scaled to 0…1."""
    latency_seconds: float
    throughput_rps: float
    """Rows per second of all replicas at saturation."""
    penalty: float = 0.0
    """Switching cost, subtracted from the objective."""
    planned_escalation: EscalationPlan | None = None
    """Escalation of the low-confidence rows."""
    other_groups: tuple[ReplicaGroupPlan, ...] = ()
    """Replicas of other replica groups than the variant's; replicas are those of the variant's group."""
    rows: Callable[[], Mapping[AnsweredBy, float]] | None = None
    """Shares of the rows by the point that answers them, if there are other groups."""
    mixed: bool = False
    """Whether a part of the rows is served by a lighter point; accuracy and value are those of all rows."""
    least_accuracy: float = 1.0
    """Accuracy of the lighter point of a mix."""
    disaggregated: bool | None = None
    """Whether it requires disaggregated encoders; None if it fits both placements."""
    flavors: Mapping[str, float] = MappingProxyType({})
    """Devices by resource flavor, cores of a flavor without devices, if flavors have limits."""

    @property
    def model(self) -> tuple[str, str]:
        again = "" if self.planned_escalation is None else f" > {self.planned_escalation}"
        others = "".join(f" + {group.variant}" for group in self.other_groups)
        return self.variant, self.operating_point + again + others


@dataclass(frozen=True, slots=True)
class StageOptions:
    """A stage, its options, and the indices of its predecessors."""

    name: str
    predecessors: tuple[int, ...]
    options: Sequence[Option]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight of accuracy 1.0, of a cost of 1 an hour and of one row of batch size in the objective."""

    accuracy: float
    cost: float
    batch: float


@dataclass(frozen=True, slots=True)
class Program:
    """Choose one option per stage (in topological order) so that the objective is greatest."""

    stages: tuple[StageOptions, ...]
    slo_seconds: float
    cores: float
    gpus: int
    metric: str
    weights: Weights
    accuracy_floor: float = 0.0
    other_than: tuple[tuple[str, str], ...] | None = None
    """At least one stage must run another model than this."""
    cost: float = math.inf
    """Greatest cost an hour."""
    flavors: tuple[tuple[str, float], ...] = ()
    """Resource flavors with a limit of devices, or of cores without devices."""

    @property
    def limits(self) -> tuple[float, ...]:
        """Limits of what the options of a choice together use, in the order of `uses`."""
        return self.cores, self.gpus, self.cost, *(limit for _, limit in self.flavors)

    def uses(self, option: Option) -> tuple[float, ...]:
        return option.cores, option.gpus, option.cost, *(option.flavors.get(name, 0.0) for name, _ in self.flavors)

    def value(self, choice: Sequence[Option]) -> float:
        """The pipeline accuracy in the objective's metric, 0…1."""
        return pipeline_accuracy((option.value for option in choice), self.metric)

    def objective(self, choice: Sequence[Option]) -> float:
        """α·accuracy − β·cost − δ·Σ batch − switching costs (IPA, eq. 9, whose cost is the cores)."""
        spent = self.weights.cost * sum(option.cost for option in choice)
        spent += self.weights.batch * sum(option.batch_size for option in choice)
        return self.weights.accuracy * self.value(choice) - spent - sum(option.penalty for option in choice)

    def latency_seconds(self, choice: Sequence[Option]) -> float:
        """The latency of the slowest path: stages on a path add, parallel branches take the maximum."""
        finish: list[float] = []
        for stage, option in zip(self.stages, choice, strict=True):
            start = max((finish[p] for p in stage.predecessors), default=0.0)
            finish.append(start + option.latency_seconds)
        return max(finish)

    def is_feasible(self, choice: Sequence[Option]) -> bool:
        return (
            self.latency_seconds(choice) <= self.slo_seconds + TOLERANCE
            and all(
                used <= limit + TOLERANCE
                for used, limit in zip(map(sum, zip(*map(self.uses, choice), strict=True)), self.limits, strict=True)
            )
            and self.value(choice) >= self.accuracy_floor - TOLERANCE
            and (self.other_than is None or models(choice) != self.other_than)
            and len({option.disaggregated for option in choice} - {None}) <= 1
        )

    @property
    def has_placement_choice(self) -> bool:
        """Whether there are both colocated and disaggregated options, which no choice may mix."""
        return {True, False} <= {option.disaggregated for stage in self.stages for option in stage.options}

    def with_placement(self, *, disaggregated: bool) -> "Program":
        """The program with the options of one encoder placement only."""
        kept = {None, disaggregated}
        return replace(
            self,
            stages=tuple(
                replace(stage, options=tuple(option for option in stage.options if option.disaggregated in kept))
                for stage in self.stages
            ),
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """The best choice, one option per stage of the program, and its objective."""

    choice: tuple[Option, ...]
    objective: float
    gap: float = 0.0
    """Proven bound: no choice is better by more than this."""
    solver: str = "Exact"
    note: str = ""
    """Why another solver than the requested one was used, or why there is a gap."""

    @property
    def cores(self) -> float:
        return sum(option.cores for option in self.choice)

    @property
    def gpus(self) -> int:
        return sum(option.gpus for option in self.choice)


def models(choice: Iterable[Option]) -> tuple[tuple[str, str], ...]:
    return tuple(option.model for option in choice)


def objective_weights(objective: Objective) -> Weights:
    """The weights of a goal; what the goal does not ask for only breaks ties.

    MaxAccuracy and MinCost keep the scale of the user's weights, so that the switching cost has the same meaning.
    """
    accuracy, cost = objective.accuracy_weight or 1.0, objective.cost_weight or 1.0
    match objective.goal:
        case "MaxAccuracy":
            return Weights(accuracy, accuracy * TIE_BREAK, accuracy * TIE_BREAK * 1e-3)
        case "MinCost":
            return Weights(cost * TIE_BREAK, cost, cost * TIE_BREAK * 1e-3)
        case _:
            return Weights(objective.accuracy_weight, objective.cost_weight, objective.batch_weight)


Solver = Callable[[Program], Solution | None]


class SolverUnavailable(Exception):
    """The solver cannot solve this program here; the message says why and what would help."""
