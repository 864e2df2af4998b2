"""The optimal choice, by label setting with bounds: exact, without a licence, any number of stages, any small DAG.

A label is a partial choice: one option for each stage so far. Labels dominated in everything that still matters are
dropped, and so are labels whose best completion cannot beat a plan already known, as prices (`envelope`) and counts
(`grid`) bound it. Narrow passes first find good plans to beat, until a pass had to give up none of its labels: then its
plan is optimal. Everything is numpy over whole fronts of labels. A few thousand choices are compared all at once
instead.

The narrowest pass is always made; a wider one ends when the time is up. What its labels could still have reached is the
gap, and the solution says so.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.enumeration import MOST_CHOICES, best_of_all, choices
from trimtab_adapter.solvers.labels import Labels, root
from trimtab_adapter.solvers.multipliers import Multipliers, optimize_multipliers
from trimtab_adapter.solvers.program import TOLERANCE, Option, Program, Solution
from trimtab_adapter.solvers.program_arrays import Floats, ProgramArrays, to_arrays
from trimtab_adapter.solvers.resource_bound import MOST_COUNTED, count
from trimtab_adapter.solvers.time_limit import SOLVE_SECONDS, seconds_left

WIDTHS = (48, 400, 6_000, 50_000)  # labels a stage keeps in each pass; where even the last is too few, the gap says so
MOST_EXTENSIONS = 16_000_000  # labels × options of one stage: what one step may hold in memory
_EPSILON = 1e-12  # a bound must beat the plan known by more than rounding


class _Bound(Protocol):
    """What says at most how much labels can reach."""

    def bound(self, stage: int, labels: Labels) -> Floats:
        """The most that labels of the stages before `stage` can reach, of shape [labels]."""


def solve(program: Program, time_limit_seconds: float = SOLVE_SECONDS) -> Solution | None:
    """An optimal solution, or None where no choice keeps every constraint.

    Where the time is up it is the best found, with the gap that is left; None then only means that none was found.
    """
    until = time.monotonic() + seconds_left(time_limit_seconds)
    table = to_arrays(program)
    if table is None:
        return None
    if choices(table) > MOST_CHOICES:
        return search(program, table, until=until)
    picks = best_of_all(program, table)
    if picks is None:
        return None
    found = _options(program, table, picks)
    return Solution(tuple(found), program.objective(found))


def search(
    program: Program, table: ProgramArrays, widths: Sequence[int] = WIDTHS, until: float = math.inf
) -> Solution | None:
    """A solution and its gap: the most that a better choice, among those that had to be given up, could gain.

    Without a gap None is a proof too; where even the last of the `widths` was too few, it only means that no choice was
    found.
    """
    known: list[Option] | None = None
    priced = optimize_multipliers(program, table)
    for guess in priced.guesses:
        known = _better(program, known, _options(program, table, guess))
    bounds = _bounds(program, table, priced, _target(program, known))
    lost, note = math.inf, ""
    for width in widths:
        passed = _Search(
            program, table, bounds, _target(program, known), width, math.inf if width == widths[0] else until
        )
        found = passed.run()
        if found is not None:
            known = _better(program, known, _options(program, table, found))
        lost = min(lost, passed.lost)
        if lost == -math.inf or (known is not None and lost <= program.objective(known)):
            break
        if time.monotonic() > until:
            note = "stopped when its time was up"
            break
    if known is None:
        return None
    objective = program.objective(known)
    gap = max(0.0, lost - objective)
    return Solution(
        tuple(known), objective, gap, note=f"{note}; no plan is better by more than {gap:.4g}" if note else ""
    )


def _bounds(program: Program, table: ProgramArrays, priced: Multipliers, target: float) -> list[_Bound]:
    """What prices promise, and where that does not prove the target what counting promises too."""
    best = priced.envelopes[0]
    if best.greedy()[1] <= target:
        return [best]
    if not priced.broken:
        return [*priced.envelopes]
    return [*priced.envelopes, count(program, table, best.prices, priced.broken[:MOST_COUNTED])]


def _options(program: Program, table: ProgramArrays, picks: Sequence[int]) -> list[Option]:
    return [
        stage.options[column.index[pick]]
        for stage, column, pick in zip(program.stages, table.columns, picks, strict=True)
    ]


def _better(program: Program, known: list[Option] | None, found: list[Option]) -> list[Option] | None:
    if not program.is_feasible(found):
        return known
    return found if known is None or program.objective(found) > program.objective(known) else known


@dataclass(slots=True)
class _Search:
    """One pass over the stages: what to beat, and how many labels a stage may keep."""

    program: Program
    table: ProgramArrays
    bounds: Sequence[_Bound]
    target: float
    width: int
    until: float = math.inf  # on the monotonic clock
    lost: float = -math.inf  # the most that labels given up for want of room or time could have reached

    def run(self) -> list[int] | None:
        """Extend labels stage by stage; return the picks of the best one that beats the target, or None."""
        fronts = [root(self.program)]
        for k in range(len(self.table.columns)):
            if self._expired():
                self.lost = max(self.lost, float(self._most(fronts[-1], k).max()))
                return None
            front = self._prune(self._extend(fronts[-1], k), k + 1)
            if front.value.size == 0:
                return None
            fronts.append(front)
        reached = self.program.weights.accuracy * fronts[-1].value - fronts[-1].cost
        return _trace(fronts, int(reached.argmax()))

    def _extend(self, labels: Labels, k: int) -> Labels:
        """Add each option of stage k to each label, unless latency or budget can no longer be kept."""
        program, table, column = self.program, self.table, self.table.columns[k]
        finish = _start(labels, self._awaited(k), program.stages[k].predecessors)[:, None] + column.seconds
        possible = finish + table.least_tail[k] <= program.slo_seconds + TOLERANCE
        if table.cores_bind:
            possible &= labels.cores[:, None] + column.cores + table.least_cores[k + 1] <= program.cores + TOLERANCE
        if table.gpus_bind:
            possible &= labels.gpus[:, None] + column.gpus + table.least_gpus[k + 1] <= program.gpus + TOLERANCE
        if table.divided:
            apart = labels.apart[:, None]
            possible &= (apart == column.apart) | (apart < 0) | (column.apart < 0)
        parent, option = np.nonzero(possible)
        return self._grow(labels, k, parent, option, finish[parent, option])

    def _awaited(self, k: int) -> tuple[tuple[int, ...], ...]:
        return self.table.live[k - 1] if k else ()

    def _grow(
        self, labels: Labels, k: int, parent: NDArray[np.intp], option: NDArray[np.intp], finish: Floats
    ) -> Labels:
        table, column, awaited = self.table, self.table.columns[k], self._awaited(k)
        value = labels.value[parent]
        rows = [
            np.maximum.reduce(
                [labels.finish[n, parent] for n, before in enumerate(awaited) if before[0] in group]
                + ([finish] if k in group else [])
            )
            for group in table.live[k]
        ]
        return Labels(
            value=value * column.value[option] if table.is_product else value + column.value[option],
            cost=labels.cost[parent] + column.cost[option],
            cores=labels.cores[parent] + column.cores[option],
            gpus=labels.gpus[parent] + column.gpus[option],
            flow_seconds=labels.flow_seconds[parent] + table.flow[k] * column.seconds[option],
            same=labels.same[parent] & column.same[option],
            apart=np.maximum(labels.apart[parent], column.apart[option]),
            finish=np.array(rows).reshape(len(rows), parent.size),
            parent=parent,
            option=option,
        )

    def _prune(self, labels: Labels, stage: int) -> Labels:
        """Drop labels that cannot reach the floor, differ where asked, or beat the target; then dominated ones."""
        table = self.table
        most = labels.value * table.most_value[stage] if table.is_product else labels.value + table.most_value[stage]
        bounds = self._most(labels, stage)
        keep = (most >= self.program.accuracy_floor - TOLERANCE) & (bounds > self.target)
        if table.differs and stage == len(table.columns):
            keep &= ~labels.same
        which, room = np.nonzero(keep)[0], self._room(stage)
        if which.size > room:
            ranked = which[np.argpartition(-bounds[which], room)]
            which = ranked[:room]
            self.lost = max(self.lost, float(bounds[ranked[room:]].max()))
        labels = labels.take(which)
        return labels.take(undominated(_respects(table, labels), self._expired))

    def _expired(self) -> bool:
        return time.monotonic() > self.until

    def _room(self, stage: int) -> int:
        """How many labels may be extended by a stage."""
        columns = self.table.columns
        if stage == len(columns):
            return self.width
        return max(1, min(self.width, MOST_EXTENSIONS // columns[stage].index.size))

    def _most(self, labels: Labels, stage: int) -> Floats:
        return np.asarray(np.minimum.reduce([each.bound(stage, labels) for each in self.bounds]))


def _target(program: Program, known: list[Option] | None) -> float:
    if known is None:
        return -math.inf
    objective = program.objective(known)
    return objective + _EPSILON * max(1.0, abs(objective))


def _start(labels: Labels, awaited: tuple[tuple[int, ...], ...], predecessors: tuple[int, ...]) -> Floats:
    """When the stage's inputs are there; a group is read as a whole or not at all."""
    if not predecessors:
        return np.zeros(labels.value.size)
    return np.asarray(labels.finish[[n for n, group in enumerate(awaited) if group[0] in predecessors]].max(axis=0))


def _respects(table: ProgramArrays, labels: Labels) -> list[Floats]:
    """What a label must be no worse in to dominate another, less being better; each of shape [labels]."""
    respects = [labels.cost, -labels.value, *labels.finish]
    if table.cores_bind:
        respects.append(labels.cores)
    if table.gpus_bind:
        respects.append(labels.gpus)
    if table.differs:
        respects.append(labels.same.astype(np.float64))
    if table.divided:
        respects += [labels.apart.astype(np.float64), -labels.apart.astype(np.float64)]
    return respects


def _trace(fronts: Sequence[Labels], best: int) -> list[int]:
    picks: list[int] = []
    for front in reversed(fronts[1:]):
        picks.append(int(front.option[best]))
        best = int(front.parent[best])
    return picks[::-1]
