"""Job groups: the units that a plan schedules. A group is one job, a part of a large job, or several small jobs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from trimtab_pipelines.row_splits import UNIT, Floats, Integers
from trimtab_router.scheduling.policies.interface import RESPONSE_MARGIN_SECONDS, Dispatch, Point, SchedulerView
from trimtab_router.scheduling.policies.option_cache import OptionCache, ScaledSplits, undominated
from trimtab_router.scheduling.policies.split_table import MAX_SPLIT_ROWS, ServingOption, SplitSet, SplitTable
from trimtab_router.scheduling.stage_request import RowSlice, Signature

_GroupKey = tuple[Signature, str, str | None, int]
SMALL_SHARE = 4
"""Jobs below this part of a batch are grouped; larger jobs may be split over several points."""
MAX_PLANNED_SLICES = 256
"""Later slices are not planned: they are dispatched long after this batch."""


@dataclass(slots=True, eq=False)
class JobGroup:
    """Rows that are scheduled as one."""

    slices: list[RowSlice]
    """By deadline; the last may be counted in part."""
    rows: int
    deadline: float
    """Time by which this stage must complete the first slice."""
    floor: float = 0.0
    """The highest mean accuracy that a slice requires."""
    value: float = 0.0
    """Value of any response to these rows, apart from its accuracy. Rows with a provisional response count
    `FLOOR_VALUE` of theirs if that response misses their floor, else nothing."""
    weight: float = 0.0
    """Mean value of a correct row."""
    provisional_accuracy: float = 0.0
    """Mean accuracy of the provisional responses; 0 if there are none."""

    def add(self, row_slice: RowSlice, rows: int, deadline: float) -> None:
        """Add this many rows of a slice."""
        request, total = row_slice.request, self.rows + rows
        provisional = row_slice.provisional_response.accuracy if row_slice.provisional_response is not None else 0.0
        self.weight += (request.options.utility - self.weight) * rows / total
        self.provisional_accuracy += (provisional - self.provisional_accuracy) * rows / total
        value = request.options.utility * _PRIORITY_FACTOR ** (3 - request.options.priority) * rows / request.rows
        if row_slice.provisional_response is None:
            self.floor = max(self.floor, request.missing_accuracy)
            self.value += value
        elif provisional < request.accuracy_floor:
            self.value += FLOOR_VALUE * value
        self.slices.append(row_slice)
        self.rows, self.deadline = total, min(self.deadline, deadline)

    @property
    def head(self) -> RowSlice:
        return self.slices[0]


FLOOR_VALUE = 0.5
"""Share of a response's value that depends on keeping the floor."""
_PRIORITY_FACTOR = 30.0
"""Responses of one priority that are worth one of the next higher priority."""


@dataclass(frozen=True, slots=True, eq=False)
class JobOptions:
    """Options of a group, the fastest first: indices into a `SplitSet`, with seconds and values."""

    split_table: SplitTable
    split_set: SplitSet
    indices: Integers
    seconds: Floats
    values: Floats
    first_share: float = 1.0
    """Share of the group's value that the first option earns."""

    def serving_options(self, option: int) -> list[tuple[ServingOption, int]]:
        """Return the serving options of a split with their rows, the most accurate first."""
        rows = self.split_set.rows[self.indices[option]]
        rows_by_option = [(self.split_table.options[index], int(rows[index])) for index in rows.nonzero()[0]]
        return sorted(rows_by_option, key=lambda pair: -pair[0].split_option.accuracy)


def group_jobs(option_cache: OptionCache, max_groups: int, sizes: Sequence[int] = ()) -> list[JobGroup]:
    """Return the first groups of the queue, by deadline.

    Args:
        option_cache: of the view.
        max_groups: bound of the result.
        sizes: the most rows of the first, second, … group of small jobs; empty to group none.
    """
    view = option_cache.view
    groups: list[JobGroup] = []
    open_groups: dict[_GroupKey, tuple[JobGroup, int]] = {}
    for row_slice in islice(view.waiting, MAX_PLANNED_SLICES):
        deadline = row_slice.request.due_at - view.later_seconds
        if row_slice.provisional_response is not None:
            deadline -= RESPONSE_MARGIN_SECONDS  # the provisional response is sent then
        small = bool(sizes) and not row_slice.alone and SMALL_SHARE * row_slice.rows <= view.max_batch_rows
        key = _group_key(option_cache, row_slice) if small else None
        open_group, capacity = open_groups.get(key, (None, 0)) if key is not None else (None, 0)
        if open_group is not None and open_group.rows + row_slice.rows <= capacity:
            open_group.add(row_slice, row_slice.rows, deadline)
            continue
        for rows in _split_rows(row_slice.rows):
            if len(groups) == max_groups:
                return groups
            group = JobGroup([], 0, deadline)
            group.add(row_slice, rows, deadline)
            groups.append(group)
        if key is not None:
            open_groups[key] = (groups[-1], sizes[min(len(groups), len(sizes)) - 1])
    return groups


def _group_key(option_cache: OptionCache, row_slice: RowSlice) -> _GroupKey | None:
    """Return what grouped slices have in common; None if a split of its own is cheaper for the slice."""
    request, escalation = row_slice.request, row_slice.escalation
    floor = request.missing_accuracy if row_slice.provisional_response is None else 0.0
    level = 0
    if floor:
        point_options = option_cache.point_options((row_slice,))
        level = point_options.level(floor)
        if not point_options.goes_with_others(row_slice.rows, floor):
            return None
    return request.signature, request.options.task, escalation.to if escalation else None, level


def _split_rows(rows: int) -> Iterator[int]:
    while rows > 0:
        yield min(rows, MAX_SPLIT_ROWS)
        rows -= MAX_SPLIT_ROWS


def job_options(
    option_cache: OptionCache, group: JobGroup, *, mixed: bool, escalates: bool = True
) -> JobOptions | None:
    """Return the options of a group; None if none reaches its floor.

    Args:
        option_cache: of the view.
        group: the group.
        mixed: whether its rows may run at several points.
        escalates: whether low-confidence rows may be escalated.
    """
    point_options = option_cache.point_options(group.slices)
    splits = point_options.scaled_splits(
        group.rows,
        mixed=mixed and not group.provisional_accuracy,
        escalates=escalates and not group.provisional_accuracy,
    )
    if group.provisional_accuracy:
        return _improving_options(group, point_options.split_table, splits)
    first = splits.first_reaching(group.floor)
    if first == splits.seconds.size:
        return None
    weight = group.weight * group.rows
    options = JobOptions(
        point_options.split_table,
        splits.split_set,
        splits.indices[first:],
        splits.seconds[first:],
        splits.accuracy[first:] * weight,
    )
    return _with_first_pass(group, options, splits, first) if group.floor and escalates else options


def _with_first_pass(group: JobGroup, options: JobOptions, splits: ScaledSplits, first: int) -> JobOptions:
    """Add the first pass alone as the fastest option: a provisional response in time is better than none.

    Low-confidence rows stay queued for escalation and are escalated if capacity remains.
    """
    option = splits.fastest_first_pass(first)
    seconds = splits.first_pass_seconds[option]
    if seconds >= options.seconds[0]:
        return options
    index = splits.indices[option]
    serving_option = options.split_table.options[int(splits.split_set.rows[index].argmax())]
    value = min(
        options.split_table.costs[serving_option.point].accuracy * group.rows * group.weight, float(options.values[0])
    )
    return JobOptions(
        options.split_table,
        options.split_set,
        np.concatenate([[index], options.indices]),
        np.concatenate([[seconds], options.seconds]),
        np.concatenate([[value], options.values]),
        1.0 - FLOOR_VALUE,
    )


def _improving_options(group: JobGroup, split_table: SplitTable, splits: ScaledSplits) -> JobOptions | None:
    """Return the options that improve on the provisional responses of a group, with the accuracy they add.

    A profiled escalation has its profiled accuracy. Any other point is less accurate on escalated rows than on all
    rows, by an unknown amount, so it is not an option of a profiled escalation.
    """
    accuracy, escalation = splits.accuracy, group.head.escalation
    if escalation is not None and escalation.accuracy is not None:
        point = next((index for index, cost in enumerate(split_table.costs) if cost.name == escalation.to), -2)
        accuracy = np.where(splits.sole_point == point, escalation.accuracy, 0.0)
    fit = ((accuracy >= group.floor - UNIT / 2) & (accuracy > group.provisional_accuracy)).nonzero()[0]
    if not fit.size:
        return None
    fit = fit[undominated(splits.seconds[fit], accuracy[fit])]
    gain = (accuracy[fit] - group.provisional_accuracy) * (group.weight * group.rows)
    return JobOptions(split_table, splits.split_set, splits.indices[fit], splits.seconds[fit], gain)


def dispatch_first_batch(
    option_cache: OptionCache,
    group: JobGroup,
    serving_option: ServingOption,
    rows: int,
    extra_slices: Sequence[RowSlice] = (),
    spare_seconds: float = 0.0,
) -> Dispatch:
    """Dispatch the first batch of a serving option.

    Args:
        option_cache: of the view.
        group: its rows go first.
        serving_option: how they run.
        rows: rows of the group that run this way.
        extra_slices: other slices that may fill the batch, by deadline.
        spare_seconds: how much longer the batch may take because of them.
    """
    point_options = option_cache.point_options(group.slices)
    point, size = (
        point_options.points[serving_option.point],
        point_options.split_table.batches[serving_option.point].first[rows],
    )
    takes = first_rows(group.slices, size)
    if extra_slices and spare_seconds > 0 and not group.head.alone:
        takes += first_rows(extra_slices, remaining_capacity(option_cache.view, point, size, spare_seconds))
    return Dispatch(
        point, takes, escalation=serving_option.escalation.rule if serving_option.escalation is not None else None
    )


def can_share_batch(point: Point, head: RowSlice, row_slice: RowSlice) -> bool:
    """Return whether both have the same shapes of the inputs that a point reads."""
    return not row_slice.alone and _signature_read_by(point, head) == _signature_read_by(point, row_slice)


def _signature_read_by(point: Point, row_slice: RowSlice) -> Signature:
    signature = row_slice.request.signature
    return signature if point.inputs is None else tuple(entry for entry in signature if entry[0] in point.inputs)


def first_rows(slices: Iterable[RowSlice], rows: int) -> list[RowSlice]:
    taken: list[RowSlice] = []
    for row_slice in slices:
        if rows <= 0:
            break
        taken.append(row_slice if row_slice.rows <= rows else row_slice.first(rows))
        rows -= taken[-1].rows
    return taken


def remaining_capacity(view: SchedulerView, point: Point, size: int, spare_seconds: float) -> int:
    """Return how many rows may be added without exceeding `spare_seconds`."""
    limit = point.seconds(size) + spare_seconds
    low, high = size, view.max_batch_rows
    if point.seconds(high) <= limit:
        return high - size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if point.seconds(middle) <= limit else (low, middle)
    return low - size
