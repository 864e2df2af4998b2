"""The program as a mixed-integer linear one, for solvers that take such: a product of accuracies made linear, exactly.

One binary a stage option. PAS is no sum, but the accuracy of a prefix can flow through the stages as water through
pipes with gains: what leaves a stage is what enters it, times the accuracy chosen there. Let w be what enters through
each distinct accuracy of a stage. Σ w is what the stage before lets out, and w is at most y, the chosen options of that
accuracy, times the most accurate prefix. With exactly one y at 1 all other w are 0 and the one left carries everything:
so at integer points the figures are the product itself, nothing is approximated, and it takes only one continuous
column for each distinct accuracy. Pure.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.interface import SolverUnavailable
from trimtab_adapter.solvers.program import TOLERANCE, Program, Solution
from trimtab_adapter.solvers.program_arrays import Floats, ProgramArrays, to_arrays

SOLVER_TOLERANCE = 1e-9  # asked of solvers, of rows and of integers
_ATTEMPTS = 20  # choices that miss a constraint by less than the solver's tolerance, but by more than ours
Entries = dict[int, float]  # column to coefficient


@dataclass(slots=True)
class Rows:
    """Constraints, each lower ≤ Σ entries ≤ upper."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    entries: list[Entries] = field(default_factory=list)

    def add(self, entries: Entries, lower: float = -np.inf, upper: float = np.inf) -> None:
        """Add a constraint, unless it holds for all."""
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
    """Maximise worth·x under the rows; the first columns are the options, stage by stage, and binary."""

    worth: list[float]
    upper: list[float]
    rows: Rows
    stages: tuple[range, ...]  # columns of each stage's options

    @property
    def binaries(self) -> int:
        """How many columns are binary; none where nothing is chosen, and the program is linear alone."""
        return self.stages[-1].stop if self.stages else 0

    def column(self, worth: float, upper: float) -> int:
        """Add a continuous column between 0 and a bound, and return its place."""
        self.worth.append(worth)
        self.upper.append(upper)
        return len(self.worth) - 1

    def picks(self, values: Sequence[float]) -> list[int]:
        """Which option each stage takes, as its place in the table's column."""
        return [int(np.argmax(np.asarray(values)[stage.start : stage.stop])) for stage in self.stages]

    def forbid(self, picks: Sequence[int]) -> None:
        """Exclude one choice: it met the constraints within the solver's tolerance, but not within ours."""
        chosen = {stage[pick]: 1.0 for stage, pick in zip(self.stages, picks, strict=True)}
        self.rows.add(chosen, upper=len(picks) - 1.0)


def solve_by(
    name: str, run: Callable[[MilpModel], tuple[Sequence[float], float] | None], program: Program
) -> Solution | None:
    """Solve a program by a solver of linear ones: `run` returns the columns' values and a proven bound, or None."""
    table = to_arrays(program)
    if table is None:
        return None
    built = build_milp(program, table)
    for _ in range(_ATTEMPTS):
        found = run(built)
        if found is None:
            return None
        values, bound = found
        picks = built.picks(values)
        listed = zip(program.stages, table.columns, picks, strict=True)
        choice = tuple(stage.options[column.index[pick]] for stage, column, pick in listed)
        if program.is_feasible(choice):
            objective = program.objective(choice)
            return Solution(choice, objective, gap=max(0.0, bound - objective), solver=name)
        built.forbid(picks)
    raise SolverUnavailable(f"{name} found only choices that miss a constraint by a rounding error")


def build_milp(program: Program, table: ProgramArrays) -> MilpModel:
    """Write a program as a mixed-integer linear one."""
    sizes = np.cumsum([0, *(column.index.size for column in table.columns)])
    stages = tuple(range(int(a), int(b)) for a, b in itertools.pairwise(sizes))
    built = MilpModel([], [], Rows(), stages)
    for column in table.columns:
        share = np.zeros(column.value.size) if table.is_product else program.weights.accuracy * column.value
        built.worth.extend((share - column.cost).tolist())
        built.upper.extend([1.0] * column.index.size)
    for stage in stages:
        built.rows.add(dict.fromkeys(stage, 1.0), lower=1.0, upper=1.0)
    _budgets(program, table, built)
    _layout(table, built)
    _latency(program, table, built)
    _accuracy(program, table, built)
    return built


def _budgets(program: Program, table: ProgramArrays, built: MilpModel) -> None:
    if table.cores_bind:
        built.rows.add(_over(built, [c.cores for c in table.columns]), upper=program.cores)
    if table.gpus_bind:
        built.rows.add(_over(built, [c.gpus for c in table.columns]), upper=program.gpus)
    if table.differs:
        same = [column.same.astype(np.float64) for column in table.columns]
        built.rows.add(_over(built, same), upper=len(program.stages) - 1.0)


def _layout(table: ProgramArrays, built: MilpModel) -> None:
    """No stage runs for one layout where another runs for the other."""
    if not table.divided:
        return
    kinds = [[np.nonzero(column.apart == kind)[0] for kind in (0, 1)] for column in table.columns]
    for one, other in itertools.permutations(range(len(kinds)), 2):
        whole, parted = kinds[one][0], kinds[other][1]
        if whole.size and parted.size:
            chosen = [*(built.stages[one][n] for n in whole), *(built.stages[other][n] for n in parted)]
            built.rows.add(dict.fromkeys(chosen, 1.0), upper=1.0)


def _over(built: MilpModel, figures: Sequence[Floats]) -> Entries:
    return {
        column: float(figure)
        for stage, of_stage in zip(built.stages, figures, strict=True)
        for column, figure in zip(stage, of_stage, strict=True)
        if figure
    }


def _latency(program: Program, table: ProgramArrays, built: MilpModel) -> None:
    """One row for a chain; else a finish time a stage, after the finish of each stage it waits for."""
    if program.slo_seconds == np.inf:
        return
    seconds = [column.seconds for column in table.columns]
    if all(stage.predecessors == ((k - 1,) if k else ()) for k, stage in enumerate(program.stages)):
        built.rows.add(_over(built, seconds), upper=program.slo_seconds)
        return
    finish = [built.column(0.0, program.slo_seconds - tail + TOLERANCE) for tail in table.least_tail]
    for k, stage in enumerate(program.stages):
        own = {column: -float(s) for column, s in zip(built.stages[k], seconds[k], strict=True)} | {finish[k]: 1.0}
        built.rows.add(own, lower=0.0)
        for before in stage.predecessors:
            built.rows.add(own | {finish[before]: -1.0}, lower=0.0)


def _accuracy(program: Program, table: ProgramArrays, built: MilpModel) -> None:
    floor = program.accuracy_floor - TOLERANCE
    if not table.is_product:
        built.rows.add(_over(built, [c.value for c in table.columns]), lower=floor if floor > 0 else -np.inf)
        return
    least, most = 1.0, 1.0
    entering: Entries = {}
    for k, column in enumerate(table.columns):
        last = k + 1 == len(table.columns)
        flows: Entries = {}
        for value in np.unique(column.value):
            flow = built.column(program.weights.accuracy * float(value) if last else 0.0, most)
            chosen = [c for c, v in zip(built.stages[k], column.value, strict=True) if v == value]
            built.rows.add({flow: 1.0} | dict.fromkeys(chosen, -most), upper=0.0)
            built.rows.add({flow: 1.0} | dict.fromkeys(chosen, -least), lower=0.0)
            flows[flow] = float(value)
        # What enters the first stage is 1, what enters a later one is what the one before lets out.
        start = 1.0 if k == 0 else 0.0
        built.rows.add(dict.fromkeys(flows, 1.0) | {f: -v for f, v in entering.items()}, lower=start, upper=start)
        entering = flows
        least, most = least * float(column.value.min()), most * float(column.value.max())
    built.rows.add(entering, lower=floor if floor > 0 else -np.inf)
