"""`OptionCache`: the serving options of a view's points at their current speed, cached between decisions.

A split table holds profiled seconds; the current slowdown of each point scales them. Slowdowns are rounded to steps of
two percent, so that cached results serve many decisions.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import exp, log

import numpy as np

from trimtab_pipelines.row_splits import UNIT, Floats, Integers
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS
from trimtab_router.scheduling.policies.interface import Point, SchedulerView
from trimtab_router.scheduling.policies.split_table import SplitSet, SplitTable, profiled, split_table
from trimtab_router.scheduling.stage_request import RowSlice, Signature

SLOWDOWN_STEP = 0.02
Slowdowns = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScaledSplits:
    """Splits that no other split beats at the current speeds, the fastest first."""

    split_set: SplitSet
    indices: Integers
    """Indices into the split set. All arrays have shape (splits,)."""
    seconds: Floats
    """Ascending."""
    accuracy: Floats
    """Mean accuracy of a row, ascending."""
    sole_point: Integers
    """Index of the point at which all rows run once; NONE if there are several."""
    first_pass_seconds: Floats
    """Seconds of the first pass if all rows take one escalating option; else infinite."""

    def first_reaching(self, floor: float) -> int:
        """Return the index of the first split that reaches a floor, or their number if none does."""
        return int(self.accuracy.searchsorted(floor - UNIT / 2))

    def fastest_first_pass(self, begin: int) -> int:
        return begin + int(self.first_pass_seconds[begin:].argmin())


@dataclass(slots=True, eq=False)
class PointOptions:
    """The points that may serve rows with the same inputs and task, their split table and their slowdowns."""

    points: Sequence[Point]
    split_table: SplitTable
    slowdowns: Slowdowns
    most_rows: int
    _full_batch_levels: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []), init=False)

    def scaled_splits(self, rows: int, *, mixed: bool, escalates: bool = True) -> ScaledSplits:
        """Return the splits of this many rows; `mixed` over several points, `escalates` with escalation.

        While another thread builds the split table, only unsplit options are offered, so that a decision never blocks.
        """
        return _scaled_splits(
            self.split_table, rows, self.slowdowns, mixed and self.split_table.has_mixed(rows), escalates
        )

    def level(self, floor: float) -> int:
        """Return the number of unsplit options below a floor: floors of one level are reached by the same options."""
        return bisect_left(self._full_batches[0], floor - UNIT / 2) if floor else 0

    def goes_with_others(self, rows: int, floor: float) -> bool:
        """Return whether a full unsplit batch costs a row no more than a split of its own job."""
        if not floor or rows == 1:
            return True
        seconds, own = self._full_batches[1], self.scaled_splits(rows, mixed=True)
        one_way, mix = self.level(floor), own.first_reaching(floor)
        if one_way == len(seconds) or mix == own.seconds.size:
            return False
        return bool(seconds[one_way] * rows <= own.seconds[mix] * self.most_rows)

    @property
    def _full_batches(self) -> tuple[list[float], list[float]]:
        if not self._full_batch_levels[0]:
            splits = self.scaled_splits(self.most_rows, mixed=False)
            self._full_batch_levels = splits.accuracy.tolist(), splits.seconds.tolist()
        return self._full_batch_levels


class OptionCache:
    """Serving options of a view's points, for one decision; `self.view` has batches of up to `MAX_SPLIT_ROWS` rows."""

    def __init__(self, view: SchedulerView) -> None:
        self.view = view if view.max_batch_rows <= MAX_SPLIT_ROWS else replace(view, max_batch_rows=MAX_SPLIT_ROWS)
        self._points = PointSet(view.points)
        self._by_inputs_and_task: dict[tuple[frozenset[str], str], PointOptions] = {}

    def point_options(self, slices: Sequence[RowSlice]) -> PointOptions:
        """Return the options of slices in one batch: points that read only inputs which all of them have."""
        names = _input_names(slices[0].request.signature)
        for row_slice in slices[1:]:
            names &= _input_names(row_slice.request.signature)
        task = slices[0].request.options.task
        options = self._by_inputs_and_task.get((names, task))
        if options is None:
            options = self._by_inputs_and_task[names, task] = _build_point_options(
                _usable_points(self._points, names), task, self.view.max_batch_rows
            )
        return options


class PointSet:
    """Points as a dictionary key, compared by identity."""

    __slots__ = ("_hash", "points")

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)
        self._hash = hash(tuple(map(id, self.points)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PointSet) or len(self.points) != len(other.points):
            return False
        return all(mine is theirs for mine, theirs in zip(self.points, other.points, strict=True))


def precompute_tables(points: Sequence[Point], most_rows: int) -> Callable[[], None]:
    """Return a function that builds the split tables of these points on another thread.

    It builds the tables for all inputs and for each set of missing inputs, for jobs of up to `MAX_SPLIT_ROWS` rows, at
    the current speeds. Until it has run, decisions use unsplit options only, so that they do not block the event loop.
    """
    most_rows = min(most_rows, MAX_SPLIT_ROWS)
    point_set = PointSet(points)
    point_sets = {point_set, *(_usable_points(point_set, p.inputs) for p in points if p.inputs is not None)}
    all_options = [
        _build_point_options(usable, "", most_rows)
        for usable in sorted(point_sets, key=lambda point_set: -len(point_set.points))
    ]
    for point_options in all_options:
        point_options.split_table.building = point_options.split_table.max_mixed_rows < MAX_SPLIT_ROWS
    return partial(_build_tables, all_options)


def _build_tables(all_options: Sequence[PointOptions]) -> None:
    for point_options in all_options:
        try:
            point_options.split_table.mixed(MAX_SPLIT_ROWS)
        finally:
            point_options.split_table.building = False
        for rows in range(1, MAX_SPLIT_ROWS + 1):
            point_options.scaled_splits(rows, mixed=True)
            point_options.scaled_splits(rows, mixed=False)


def _build_point_options(point_set: PointSet, task: str, most_rows: int) -> PointOptions:
    slowdowns = tuple(_slowdown(point, most_rows) for point in point_set.points)
    all_profiled = all(point.profiled for point in point_set.points)
    build = _cached_split_table if all_profiled else _build_split_table
    return PointOptions(point_set.points, build(point_set, task, most_rows), slowdowns, most_rows)


@lru_cache(maxsize=1024)
def _input_names(signature: Signature) -> frozenset[str]:
    return frozenset(name for name, _ in signature)


@lru_cache(maxsize=256)
def _usable_points(points: PointSet, names: frozenset[str]) -> PointSet:
    """Return the points that read only these inputs; if there are none, those that read at least one of them."""
    complete = [point for point in points.points if point.inputs is not None and point.inputs <= names]
    complete += [point for point in points.points if point.inputs is None]
    usable = [point for point in points.points if point.inputs is None or point.inputs & names]
    return PointSet(complete or usable or points.points)


def _build_split_table(point_set: PointSet, task: str, most_rows: int) -> SplitTable:
    return split_table(point_set.points, task, most_rows)


_cached_split_table = lru_cache(maxsize=256)(_build_split_table)


def _slowdown(point: Point, most_rows: int) -> float:
    before = profiled(point, most_rows)[-1]
    now = point.seconds(most_rows)
    if before <= 0 or now <= 0:
        return 1.0
    return exp(round(log(now / before) / SLOWDOWN_STEP) * SLOWDOWN_STEP)


@lru_cache(maxsize=4096)
def _scaled_splits(
    table: SplitTable,
    rows: int,
    slowdowns: Slowdowns,
    mixed: bool,  # noqa: FBT001 - a cache key
    escalates: bool,  # noqa: FBT001
) -> ScaledSplits:
    split_set = table.mixed(rows) if mixed else table.plain(rows)
    if not escalates:
        split_set = split_set.select(np.flatnonzero(~split_set.escalates))
    scales = np.array((*slowdowns, 1.0))
    seconds = split_set.seconds(scales[:-1])
    indices = undominated(seconds, split_set.accuracy)
    passes = (table.first_pass_seconds[rows] * scales)[split_set.first_pass_point[indices]]
    return ScaledSplits(
        split_set, indices, seconds[indices], split_set.accuracy[indices], split_set.sole_point[indices], passes
    )


def undominated(seconds: Floats, values: Floats) -> Integers:
    """Return the indices of options with more value than every option that is no slower, the fastest first."""
    order: Integers = np.lexsort((-values, seconds))
    best = np.maximum.accumulate(values[order])
    rising = np.ones(order.size, np.bool_)
    np.greater(best[1:], best[:-1], out=rising[1:])
    return order[rising]
