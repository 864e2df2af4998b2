"""Mixed-integer linear form of the program, with the product of accuracies made linear exactly.

One binary per stage option. PAS is no sum, but the accuracy of a prefix can flow through the stages as through a
network with gains: the flow out of a stage is the flow into it, times the accuracy chosen there. Let w be the flow
through each distinct accuracy of a stage. Σ w is the flow out of the previous stage, and w is at most y, the chosen
options of that accuracy, times the most accurate prefix. With exactly one y at 1 all other w are 0 and one w carries
everything: at integer points the figures are the product itself, with only one continuous column per distinct accuracy.
"""

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.option_table import Floats
from trimtab_adapter.solvers.program import TOLERANCE, Program, Solution, SolverUnavailable
from trimtab_adapter.solvers.program_arrays import ProgramArrays, to_arrays

SOLVER_TOLERANCE = 1e-9
"""Tolerance of solvers, of rows and of integers."""
_ATTEMPTS = 20
"""Choices excluded because they violate a constraint within the solver's tolerance, but not within ours."""
Entries = dict[int, float]
"""Column to coefficient."""


@dataclass(slots=True)
class Rows:
    """Constraints, each lower ≤ Σ entries ≤ upper."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    entries: list[Entries] = field(default_factory=list)

    def add(self, entries: Entries, lower: float = -np.inf, upper: float = np.inf) -> None:
        """Add a constraint, unless it always holds."""
        if lower > -np.inf or upper < np.inf:
            self.entries.append(entries)
            self.lower.append(lower)
            self.upper.append(upper)

    def compressed(self) -> tuple[NDArray[np.int32], NDArray[np.int32], Floats]:
        """Starts of the rows, columns and coefficients."""
        starts = np.cumsum([0, *(len(row) for row in self.entries)], dtype=np.int32)
        columns = np.array([column for row in self.entries for column in row], dtype=np.int32)
        return starts, columns, np.array([value for row in self.entries for value in row.values()], dtype=np.float64)


@dataclass(slots=True)
class MilpModel:
    """Maximise objective·x under the rows; the first columns are the options, stage by stage, and binary."""

    objective: list[float]
    upper: list[float]
    rows: Rows
    stages: tuple[range, ...]
    """Columns of each stage's options."""

    @property
    def binaries(self) -> int:
        """The number of binary columns; 0 for a purely linear program."""
        return self.stages[-1].stop if self.stages else 0

    def column(self, objective: float, upper: float) -> int:
        """Add a continuous column between 0 and a bound, and return its index."""
        self.objective.append(objective)
        self.upper.append(upper)
        return len(self.objective) - 1

    def picks(self, values: Sequence[float]) -> list[int]:
        """The option each stage takes, as an index into its `Column`."""
        return [int(np.argmax(np.asarray(values)[stage.start : stage.stop])) for stage in self.stages]

    def forbid(self, picks: Sequence[int]) -> None:
        """Exclude one choice that violates a constraint within the solver's tolerance."""
        chosen = {stage[pick]: 1.0 for stage, pick in zip(self.stages, picks, strict=True)}
        self.rows.add(chosen, upper=len(picks) - 1.0)


def import_solver(name: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        hint = f"pip install '.[{extra}]' in a clone, else 'trimtab[{extra}]'"
        raise SolverUnavailable(f"{name} is not installed: {hint}") from error


def solve_by(
    name: str, run: Callable[[MilpModel], tuple[Sequence[float], float] | None], program: Program
) -> Solution | None:
    """Solve a program by a linear solver: `run` returns the columns' values and a proven bound, or None."""
    arrays = to_arrays(program)
    if arrays is None:
        return None
    milp = build_milp(program, arrays)
    for _ in range(_ATTEMPTS):
        found = run(milp)
        if found is None:
            return None
        values, bound = found
        picks = milp.picks(values)
        listed = zip(program.stages, arrays.columns, picks, strict=True)
        choice = tuple(stage.options[column.index[pick]] for stage, column, pick in listed)
        if program.is_feasible(choice):
            objective = program.objective(choice)
            return Solution(choice, objective, gap=max(0.0, bound - objective), solver=name)
        milp.forbid(picks)
    raise SolverUnavailable(f"{name} found only choices that violate a constraint by a rounding error")


def build_milp(program: Program, arrays: ProgramArrays) -> MilpModel:
    sizes = np.cumsum([0, *(column.index.size for column in arrays.columns)])
    stages = tuple(range(int(a), int(b)) for a, b in itertools.pairwise(sizes))
    milp = MilpModel([], [], Rows(), stages)
    for column in arrays.columns:
        share = np.zeros(column.value.size) if arrays.is_product else program.weights.accuracy * column.value
        milp.objective.extend((share - column.cost).tolist())
        milp.upper.extend([1.0] * column.index.size)
    for stage in stages:
        milp.rows.add(dict.fromkeys(stage, 1.0), lower=1.0, upper=1.0)
    for n, limit in enumerate(arrays.limits):
        milp.rows.add(_over(milp, [c.uses[n] for c in arrays.columns]), upper=limit)
    if arrays.differs:
        same = [column.same.astype(np.float64) for column in arrays.columns]
        milp.rows.add(_over(milp, same), upper=len(program.stages) - 1.0)
    if arrays.has_placement_choice:
        _encoder_placement(arrays, milp)
    _latency(program, arrays, milp)
    _accuracy(program, arrays, milp)
    return milp


def _encoder_placement(arrays: ProgramArrays, milp: MilpModel) -> None:
    """Do not mix colocated and disaggregated options."""
    kinds = [[np.nonzero(column.disaggregated == kind)[0] for kind in (0, 1)] for column in arrays.columns]
    for first, second in itertools.permutations(range(len(kinds)), 2):
        colocated, disaggregated = kinds[first][0], kinds[second][1]
        if colocated.size and disaggregated.size:
            chosen = [*(milp.stages[first][n] for n in colocated), *(milp.stages[second][n] for n in disaggregated)]
            milp.rows.add(dict.fromkeys(chosen, 1.0), upper=1.0)


def _over(milp: MilpModel, figures: Sequence[Floats]) -> Entries:
    return {
        column: float(figure)
        for stage, of_stage in zip(milp.stages, figures, strict=True)
        for column, figure in zip(stage, of_stage, strict=True)
        if figure
    }


def _latency(program: Program, arrays: ProgramArrays, milp: MilpModel) -> None:
    """One row for a chain; otherwise a finish time per stage, after the finish of each predecessor."""
    if program.slo_seconds == np.inf:
        return
    seconds = [column.seconds for column in arrays.columns]
    if all(stage.predecessors == ((k - 1,) if k else ()) for k, stage in enumerate(program.stages)):
        milp.rows.add(_over(milp, seconds), upper=program.slo_seconds)
        return
    finish = [milp.column(0.0, program.slo_seconds - tail + TOLERANCE) for tail in arrays.min_tail]
    for k, stage in enumerate(program.stages):
        own = {column: -float(s) for column, s in zip(milp.stages[k], seconds[k], strict=True)} | {finish[k]: 1.0}
        milp.rows.add(own, lower=0.0)
        for before in stage.predecessors:
            milp.rows.add(own | {finish[before]: -1.0}, lower=0.0)


def _accuracy(program: Program, arrays: ProgramArrays, milp: MilpModel) -> None:
    floor = program.accuracy_floor - TOLERANCE
    if not arrays.is_product:
        milp.rows.add(_over(milp, [c.value for c in arrays.columns]), lower=floor if floor > 0 else -np.inf)
        return
    least, most = 1.0, 1.0
    entering: Entries = {}
    for k, column in enumerate(arrays.columns):
        last = k + 1 == len(arrays.columns)
        flows: Entries = {}
        for value in np.unique(column.value):
            flow = milp.column(program.weights.accuracy * float(value) if last else 0.0, most)
            chosen = [c for c, v in zip(milp.stages[k], column.value, strict=True) if v == value]
            milp.rows.add({flow: 1.0} | dict.fromkeys(chosen, -most), upper=0.0)
            milp.rows.add({flow: 1.0} | dict.fromkeys(chosen, -least), lower=0.0)
            flows[flow] = float(value)
        # The flow into the first stage is 1; into a later one it is the flow out of the previous one.
        start = 1.0 if k == 0 else 0.0
        milp.rows.add(dict.fromkeys(flows, 1.0) | {f: -v for f, v in entering.items()}, lower=start, upper=start)
        entering = flows
        least, most = least * float(column.value.min()), most * float(column.value.max())
    milp.rows.add(entering, lower=floor if floor > 0 else -np.inf)
