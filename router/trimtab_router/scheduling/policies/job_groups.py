"""What waits, in the units that are planned: a job, a part of a large one, or small ones as one batch. Pure."""

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
"""A job of less than this part of a batch goes with others; a larger one may be split over several points."""
MAX_PLANNED_SLICES = 256
"""Slices that are looked at: what comes after them leaves long after this departure."""


@dataclass(slots=True, eq=False)
class JobGroup:
    """Rows that are planned as one."""

    slices: list[RowSlice]
    """Of which they are, most urgent first; of the last maybe not all."""
    rows: int
    """Of all."""
    deadline: float
    """By which this stage must be done with the first."""
    floor: float = 0.0
    """Mean accuracy that none may stay below."""
    value: float = 0.0
    """What an answer to all of them is worth, their accuracy aside; `FLOOR_WORTH` of it where they have one that is
    below their floor, 0 where they have one that keeps it."""
    weight: float = 0.0
    """What a right answer to a row is worth, on average."""
    provisional_accuracy: float = 0.0
    """Accuracy of the answers they have, on average; 0 without."""

    def add(self, row_slice: RowSlice, rows: int, deadline: float) -> None:
        """One more, of which so many rows."""
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
        """The most urgent."""
        return self.slices[0]


FLOOR_VALUE = 0.5
"""Of an answer's worth, what it is worth that it keeps its floor; the rest is that it is there at all."""
_PRIORITY_FACTOR = 30.0
"""How many answers of one priority are worth one of the next higher."""


@dataclass(frozen=True, slots=True, eq=False)
class JobOptions:
    """What a unit may choose among, from the fastest on: each is a split of the page at its place."""

    split_table: SplitTable
    split_set: SplitSet
    indices: Integers
    seconds: Floats
    values: Floats
    first_share: float = 1.0
    """Of the unit's worth, the share that the first option gives."""

    def serving_options(self, option: int) -> list[tuple[ServingOption, int]]:
        """The lines of an option and their rows, the most accurate line first."""
        rows = self.split_set.rows[self.indices[option]]
        rows_by_option = [(self.split_table.options[index], int(rows[index])) for index in rows.nonzero()[0]]
        return sorted(rows_by_option, key=lambda pair: -pair[0].split_option.accuracy)


def group_jobs(option_cache: OptionCache, max_groups: int, sizes: Sequence[int] = ()) -> list[JobGroup]:
    """The first units along the queue, by deadline.

    Args:
        menu: of a view.
        most: how many at most.
        sizes: the most rows that the first, second, … are made up to from small jobs; none: each job by itself.
    """
    view = option_cache.view
    groups: list[JobGroup] = []
    open_groups: dict[_GroupKey, tuple[JobGroup, int]] = {}
    for row_slice in islice(view.waiting, MAX_PLANNED_SLICES):
        deadline = row_slice.request.due_at - view.later_seconds
        if row_slice.provisional_response is not None:
            deadline -= RESPONSE_MARGIN_SECONDS  # then what is provisional leaves
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
    """What slices have in common that go together; None where a mix of points of its own costs a slice less."""
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
    """What a unit may choose among; None where nothing reaches its floor.

    Args:
        menu: the points, and what they take now.
        unit: the rows.
        mixed: whether they may go at several points.
        looks: whether the least certain may be looked at again.
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
    """What a unit may choose among, and at worst the first pass alone: an answer is there, and says it is provisional.

    Rows that are doubted wait for their second look all the same, and get it if there is time after all.
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
    """What rows may choose among that have an answer: what is more accurate than that, and how much.

    A second look that was measured has the accuracy it was measured to have. How accurate any other point is on rows
    that were picked out nobody knows: less than on all.
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
    """Let the first batch of so many rows of a unit leave by a line.

    Args:
        menu: the points.
        unit: whose rows go first.
        line: how they go.
        rows: of the unit that go that way.
        mates: others that may fill the batch, most urgent first.
        spare_seconds: how much longer the batch may take for their sake.
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
    """Whether the shapes of what a point reads of them are the same."""
    return not row_slice.alone and _signature_read_by(point, head) == _signature_read_by(point, row_slice)


def _signature_read_by(point: Point, row_slice: RowSlice) -> Signature:
    signature = row_slice.request.signature
    return signature if point.inputs is None else tuple(entry for entry in signature if entry[0] in point.inputs)


def first_rows(slices: Iterable[RowSlice], rows: int) -> list[RowSlice]:
    """The first so many rows of these."""
    taken: list[RowSlice] = []
    for row_slice in slices:
        if rows <= 0:
            break
        taken.append(row_slice if row_slice.rows <= rows else row_slice.first(rows))
        rows -= taken[-1].rows
    return taken


def remaining_capacity(view: SchedulerView, point: Point, size: int, spare_seconds: float) -> int:
    """How many rows more the batch may have."""
    limit = point.seconds(size) + spare_seconds
    low, high = size, view.max_batch_rows
    if point.seconds(high) <= limit:
        return high - size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if point.seconds(middle) <= limit else (low, middle)
    return low - size
