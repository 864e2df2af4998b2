"""Job groups of `ModalityMix`, and the splits of their rows over operating points as options."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from trimtab_pipelines.row_splits import UNIT, Integers
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS
from trimtab_router.scheduling.policies.option_cache import OptionCache, ScaledSplits, undominated
from trimtab_router.scheduling.policies.queue_plan import GroupOptions, RowGroup, group_rows, priority_utility
from trimtab_router.scheduling.policies.split_table import ServingOption, SplitSet, SplitTable
from trimtab_router.scheduling.stage_request import RowSlice, Signature

SMALL_SHARE = 4  # jobs below this part of a batch are grouped; larger jobs may be split over several points
MAX_PLANNED_SLICES = 256  # later slices are not planned: they are dispatched long after this batch
FLOOR_VALUE = 0.5  # share of a response's value that depends on keeping the floor


@dataclass(slots=True, eq=False)
class JobGroup(RowGroup):
    """Rows of one task that are scheduled as one."""

    floor: float = 0.0
    """The highest mean accuracy that a slice requires."""
    value: float = 0.0
    """Value of any response to these rows, apart from its accuracy. Rows with a provisional response count
    `FLOOR_VALUE` of theirs if that response misses their floor, else nothing."""
    correct_value: float = 0.0
    """Value of correct responses to all rows."""
    provisional_correct: float = 0.0
    """Expected correct rows among the provisional responses."""

    @property
    def provisional_accuracy(self) -> float:
        return self.provisional_correct / self.rows

    def add(self, row_slice: RowSlice, rows: int) -> None:
        request, provisional = row_slice.request, row_slice.provisional_response
        self.slices.append(row_slice)
        self.rows += rows
        self.correct_value += request.options.utility * rows
        value = priority_utility(request.options.utility, request.options.priority) * rows / request.rows
        if provisional is None:
            self.floor = max(self.floor, request.missing_accuracy)
            self.value += value
            return
        self.provisional_correct += provisional.accuracy * rows
        if provisional.accuracy < request.accuracy_floor:
            self.value += FLOOR_VALUE * value

    def goes_with(self, other: "JobGroup", max_batch_rows: int) -> bool:
        first, second = self.head, other.head
        return (
            _is_small(first, max_batch_rows)
            and _is_small(second, max_batch_rows)
            and first.request.options.task == second.request.options.task
            and (first.escalation is None) == (second.escalation is None)
            and _shapes_agree(first.request.signature, second.request.signature)
        )

    def joined(self, other: "JobGroup") -> "JobGroup":
        return JobGroup(
            min(self.deadline, other.deadline),
            [*self.slices, *other.slices],
            self.rows + other.rows,
            max(self.floor, other.floor),
            self.value + other.value,
            self.correct_value + other.correct_value,
            self.provisional_correct + other.provisional_correct,
        )


def _is_small(row_slice: RowSlice, max_batch_rows: int) -> bool:
    return not row_slice.alone and SMALL_SHARE * row_slice.rows <= max_batch_rows


def _shapes_agree(first: Signature, second: Signature) -> bool:
    """Return whether the inputs that both have agree in shape, so that a point which reads no others can batch them."""
    if first == second:
        return True
    shapes = dict(first)
    return all(shapes.get(name, shape) == shape for name, shape in second) and bool(shapes.keys() & dict(second).keys())


@dataclass(frozen=True, slots=True, eq=False)
class JobOptions(GroupOptions):
    """Options of a group: splits of its rows in a `SplitSet`."""

    split_set: SplitSet
    split_table: SplitTable

    def serving_options(self, option: int) -> list[tuple[ServingOption, int]]:
        rows = self.split_set.rows[self.indices[option]]
        used = [(int(index), int(rows[index])) for index in rows.nonzero()[0]]
        accuracies = self.split_table.split_options
        used.sort(key=lambda pair: -accuracies[pair[0]].accuracy)
        return [(self.split_table.options[index], count) for index, count in used]

    def first_batch_rows(self, serving_option: ServingOption, rows: int) -> int:
        return self.split_table.batches[serving_option.point_index].first[rows]

    def select(self, indices: Integers) -> "JobOptions":
        return replace(
            self,
            indices=self.indices[indices],
            seconds=self.seconds[indices],
            values=self.values[indices],
            first_share=self.first_share if indices.size and indices[0] == 0 else 1.0,
        )


def group_jobs(option_cache: OptionCache, max_groups: int, sizes: Sequence[int] = ()) -> list[JobGroup]:
    """Return the first groups by deadline; `sizes`: bounds of the first, second, … group of small jobs, or none."""
    return group_rows(
        option_cache.view,
        JobGroup,
        partial(_group_key, option_cache) if sizes else lambda _: None,
        max_groups=max_groups,
        max_rows=MAX_SPLIT_ROWS,
        max_slices=MAX_PLANNED_SLICES,
        sizes=sizes,
    )


def _group_key(option_cache: OptionCache, row_slice: RowSlice) -> Hashable | None:
    """Return what grouped slices have in common; None for a large slice, or if a split of its own is cheaper."""
    if not _is_small(row_slice, option_cache.view.max_batch_rows):
        return None
    request, escalation = row_slice.request, row_slice.escalation
    floor = request.missing_accuracy if row_slice.provisional_response is None else 0.0
    level = 0
    if floor:
        point_options = option_cache.point_options((row_slice,))
        level = point_options.level(floor)
        if not point_options.goes_with_others(row_slice.rows, floor):
            return None
    return request.signature, request.options.task, escalation.target if escalation else None, level


def job_options(
    option_cache: OptionCache, group: JobGroup, *, mixed: bool, escalates: bool = True
) -> JobOptions | None:
    point_options = option_cache.point_options(group.slices)
    first_responses = not group.provisional_correct
    splits = point_options.scaled_splits(
        group.rows, mixed=mixed and first_responses, escalates=escalates and first_responses
    )
    if not first_responses:
        return _improving_options(group, point_options.split_table, splits)
    first = splits.first_reaching(group.floor)
    if first == splits.seconds.size:
        return None
    options = JobOptions(
        splits.indices[first:],
        splits.seconds[first:],
        splits.accuracy[first:] * group.correct_value,
        splits.split_set,
        point_options.split_table,
    )
    return _with_first_pass(group, options, splits, first) if group.floor and escalates else options


def _with_first_pass(group: JobGroup, options: JobOptions, splits: ScaledSplits, first: int) -> JobOptions:
    """Add the first pass alone as the fastest option: a provisional response in time is better than none."""
    option = splits.fastest_first_pass(first)
    seconds = splits.first_pass_seconds[option]
    if seconds >= options.seconds[0]:
        return options
    index = splits.indices[option]
    serving_option = options.split_table.options[int(splits.split_set.rows[index].argmax())]
    accuracy = options.split_table.costs[serving_option.point_index].accuracy
    return replace(
        options,
        indices=np.concatenate([[index], options.indices]),
        seconds=np.concatenate([[seconds], options.seconds]),
        values=np.concatenate([[min(accuracy * group.correct_value, float(options.values[0]))], options.values]),
        first_share=1.0 - FLOOR_VALUE,
    )


def _improving_options(group: JobGroup, split_table: SplitTable, splits: ScaledSplits) -> JobOptions | None:
    """Return the options that improve on the provisional responses of a group, with the accuracy they add.

    A point without a profiled escalation is less accurate on escalated rows, by an unknown amount, and is no option.
    """
    accuracy, escalation = splits.accuracy, group.head.escalation
    if escalation is not None and escalation.accuracy is not None:
        point = next((index for index, cost in enumerate(split_table.costs) if cost.key == escalation.target), -2)
        accuracy = np.where(splits.sole_point == point, escalation.accuracy, 0.0)
    fit = ((accuracy >= group.floor - UNIT / 2) & (accuracy > group.provisional_accuracy)).nonzero()[0]
    if not fit.size:
        return None
    fit = fit[undominated(splits.seconds[fit], accuracy[fit])]
    gain = (accuracy[fit] - group.provisional_accuracy) * group.correct_value
    return JobOptions(splits.indices[fit], splits.seconds[fit], gain, splits.split_set, split_table)
