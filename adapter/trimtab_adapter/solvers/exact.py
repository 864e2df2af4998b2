"""Exact solver: label setting with bounds, without a licence, for any number of stages and any small DAG.

A label is a partial choice: one option for each stage so far. Labels dominated in everything that still matters are
dropped, and so are labels whose best completion cannot beat a known plan, by Lagrangian bounds (`lagrangian_bound`) and
discretized resource bounds (`resource_bound`). Narrow passes first find good plans, until a pass drops no label for
lack of room: then its plan is optimal. All labels of a stage are processed as numpy arrays. Programs with a few
thousand choices are enumerated instead.

The narrowest pass always runs; a wider one ends when the time limit is reached. The solution's gap then is what its
remaining labels could have reached.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.enumeration import best_of_all
from trimtab_adapter.solvers.lagrangian_bound import LagrangianBounds, optimize_multipliers
from trimtab_adapter.solvers.option_table import Floats
from trimtab_adapter.solvers.program import TOLERANCE, Option, Program, Solution
from trimtab_adapter.solvers.program_arrays import Labels, ProgramArrays, root, to_arrays
from trimtab_adapter.solvers.resource_bound import MAX_COUNTED, ResourceBound, resource_bound
from trimtab_adapter.solvers.time_limit import SOLVE_SECONDS, seconds_left

WIDTHS = (48, 400, 6_000, 50_000)
"""Labels a stage keeps in each pass; if the last is too few, the solution has a gap."""
MAX_EXTENSIONS = 16_000_000
"""Labels × options of one stage that one step may hold in memory."""
MAX_ENUMERATED = 20_000
"""Choices; a pipeline has at most 32 stages, half of the axes an array may have."""
_EPSILON = 1e-12
"""A bound must exceed the incumbent by more than rounding."""
_Bound = LagrangianBounds | ResourceBound


def solve(program: Program, time_limit_seconds: float = SOLVE_SECONDS) -> Solution | None:
    """An optimal solution, or None if no choice satisfies every constraint.

    At the time limit it is the best solution found, with its gap; None then only means that none was found.
    """
    until = time.monotonic() + seconds_left(time_limit_seconds)
    arrays = to_arrays(program)
    if arrays is None:
        return None
    if math.prod(column.index.size for column in arrays.columns) > MAX_ENUMERATED:
        return search(program, arrays, until=until)
    picks = best_of_all(program, arrays)
    if picks is None:
        return None
    found = _options(program, arrays, picks)
    return Solution(tuple(found), program.objective(found))


def search(
    program: Program, arrays: ProgramArrays, widths: Sequence[int] = WIDTHS, until: float = math.inf
) -> Solution | None:
    """A solution and its gap: the most that a better choice among the dropped labels could gain.

    Without a gap None is a proof; if even the last of the `widths` is too few, it only means that no choice was found.
    """
    incumbent: list[Option] | None = None
    multipliers = optimize_multipliers(program, arrays)
    for guess in multipliers.guesses:
        incumbent = _better(program, incumbent, _options(program, arrays, guess))
    bounds: list[_Bound] = [*multipliers.bounds]
    best_dropped, note = math.inf, ""
    for number, width in enumerate(widths):
        if number == 1 and multipliers.broken:  # as slow as the narrowest pass, which seldom needs it
            broken = multipliers.broken[:MAX_COUNTED]
            bounds.append(resource_bound(program, arrays, bounds[0].prices, broken))
        passed = _Search(
            program, arrays, bounds, _target(program, incumbent), width, math.inf if width == widths[0] else until
        )
        found = passed.run()
        if found is not None:
            incumbent = _better(program, incumbent, _options(program, arrays, found))
        best_dropped = min(best_dropped, passed.best_dropped)
        if best_dropped == -math.inf or (incumbent is not None and best_dropped <= program.objective(incumbent)):
            break
        if time.monotonic() > until:
            note = "stopped at the time limit"
            break
    if incumbent is None:
        return None
    objective = program.objective(incumbent)
    gap = max(0.0, best_dropped - objective)
    return Solution(
        tuple(incumbent), objective, gap, note=f"{note}; no plan is better by more than {gap:.4g}" if note else ""
    )


def _options(program: Program, arrays: ProgramArrays, picks: Sequence[int]) -> list[Option]:
    return [
        stage.options[column.index[pick]]
        for stage, column, pick in zip(program.stages, arrays.columns, picks, strict=True)
    ]


def _better(program: Program, incumbent: list[Option] | None, found: list[Option]) -> list[Option] | None:
    if not program.is_feasible(found):
        return incumbent
    return found if incumbent is None or program.objective(found) > program.objective(incumbent) else incumbent


@dataclass(slots=True)
class _Search:
    """One pass over the stages with an objective to beat and a limit on labels per stage."""

    program: Program
    arrays: ProgramArrays
    bounds: Sequence[_Bound]
    target: float
    width: int
    until: float = math.inf
    """On the monotonic clock."""
    best_dropped: float = -math.inf
    """The best bound of labels dropped for lack of room or time."""

    def run(self) -> list[int] | None:
        """Extend labels stage by stage; return the picks of the best one that beats the target, or None."""
        fronts = [root(self.program, self.arrays)]
        for k in range(len(self.arrays.columns)):
            if self._expired():
                self.best_dropped = max(self.best_dropped, float(self._most(fronts[-1], k).max()))
                return None
            front = self._prune(self._extend(fronts[-1], k), k + 1)
            if front.value.size == 0:
                return None
            fronts.append(front)
        reached = self.program.weights.accuracy * fronts[-1].value - fronts[-1].cost
        return _trace(fronts, int(reached.argmax()))

    def _extend(self, labels: Labels, k: int) -> Labels:
        """Add each option of stage k to each label, unless latency or a limit is exceeded."""
        program, arrays, column = self.program, self.arrays, self.arrays.columns[k]
        awaited = arrays.live[k - 1] if k else ()
        finish = _start(labels, awaited, program.stages[k].predecessors)[:, None] + column.seconds
        possible = finish + arrays.min_tail[k] <= program.slo_seconds + TOLERANCE
        for n, limit in enumerate(arrays.limits):
            possible &= labels.uses[n, :, None] + column.uses[n] + arrays.min_uses[n, k + 1] <= limit + TOLERANCE
        if arrays.has_placement_choice:
            disaggregated = labels.disaggregated[:, None]
            possible &= (disaggregated == column.disaggregated) | (disaggregated < 0) | (column.disaggregated < 0)
        parent, option = np.nonzero(possible)
        return self._grow(labels, k, parent, option, finish[parent, option])

    def _grow(
        self, labels: Labels, k: int, parent: NDArray[np.intp], option: NDArray[np.intp], finish: Floats
    ) -> Labels:
        arrays, column = self.arrays, self.arrays.columns[k]
        awaited = arrays.live[k - 1] if k else ()
        value = labels.value[parent]
        rows = [
            np.maximum.reduce(
                [labels.finish[n, parent] for n, before in enumerate(awaited) if before[0] in group]
                + ([finish] if k in group else [])
            )
            for group in arrays.live[k]
        ]
        return Labels(
            value=value * column.value[option] if arrays.is_product else value + column.value[option],
            cost=labels.cost[parent] + column.cost[option],
            uses=labels.uses[:, parent] + column.uses[:, option],
            flow_seconds=labels.flow_seconds[parent] + arrays.flow[k] * column.seconds[option],
            same=labels.same[parent] & column.same[option],
            disaggregated=np.maximum(labels.disaggregated[parent], column.disaggregated[option]),
            finish=np.array(rows).reshape(len(rows), parent.size),
            parent=parent,
            option=option,
        )

    def _prune(self, labels: Labels, stage: int) -> Labels:
        """Drop labels that cannot reach the floor, must differ, or cannot beat the target; then dominated ones."""
        arrays = self.arrays
        most = labels.value * arrays.max_value[stage] if arrays.is_product else labels.value + arrays.max_value[stage]
        bounds = self._most(labels, stage)
        keep = (most >= self.program.accuracy_floor - TOLERANCE) & (bounds > self.target)
        if arrays.differs and stage == len(arrays.columns):
            keep &= ~labels.same
        which, room = np.nonzero(keep)[0], self._room(stage)
        if which.size > room:
            ranked = which[np.argpartition(-bounds[which], room)]
            which = ranked[:room]
            self.best_dropped = max(self.best_dropped, float(bounds[ranked[room:]].max()))
        labels = labels.take(which)
        return labels.take(undominated(_criteria(arrays, labels), self._expired))

    def _expired(self) -> bool:
        return time.monotonic() > self.until

    def _room(self, stage: int) -> int:
        columns = self.arrays.columns
        return self.width if stage == len(columns) else min(self.width, MAX_EXTENSIONS // columns[stage].index.size)

    def _most(self, labels: Labels, stage: int) -> Floats:
        return np.asarray(np.minimum.reduce([each.bound(stage, labels) for each in self.bounds]))


def _target(program: Program, incumbent: list[Option] | None) -> float:
    if incumbent is None:
        return -math.inf
    objective = program.objective(incumbent)
    return objective + _EPSILON * max(1.0, abs(objective))


def _start(labels: Labels, awaited: tuple[tuple[int, ...], ...], predecessors: tuple[int, ...]) -> Floats:
    """When the stage's inputs are complete; a group is read as a whole or not at all."""
    if not predecessors:
        return np.zeros(labels.value.size)
    return np.asarray(labels.finish[[n for n, group in enumerate(awaited) if group[0] in predecessors]].max(axis=0))


def _criteria(arrays: ProgramArrays, labels: Labels) -> list[Floats]:
    """The criteria in which a label must be no worse to dominate another, smaller is better; each of shape [labels]."""
    criteria = [labels.cost, -labels.value, *labels.finish, *labels.uses]
    if arrays.differs:
        criteria.append(labels.same.astype(np.float64))
    if arrays.has_placement_choice:
        criteria += [labels.disaggregated.astype(np.float64), -labels.disaggregated.astype(np.float64)]
    return criteria


def _trace(fronts: Sequence[Labels], best: int) -> list[int]:
    picks: list[int] = []
    for front in reversed(fronts[1:]):
        picks.append(int(front.option[best]))
        best = int(front.parent[best])
    return picks[::-1]
