"""Plan of a queue for `ModalityMix` and `TokenAdaptive`: groups of rows with options, and the first batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import inf
from typing import Generic, Self, TypeVar

from trimtab_pipelines.row_splits import Floats, Integers
from trimtab_router.scheduling.policies.deadline_schedule import assign_to_servers
from trimtab_router.scheduling.policies.interface import (
    RESPONSE_MARGIN_SECONDS,
    Dispatch,
    Point,
    SchedulerView,
    rows_within,
)
from trimtab_router.scheduling.policies.schedule_table import DROPPED, Job, JointOption, ProgramStep
from trimtab_router.scheduling.policies.split_table import ServingOption
from trimtab_router.scheduling.stage_request import RowSlice, Signature

_PRIORITY_FACTOR = 30.0  # responses of one priority that are worth one of the next higher priority


def priority_utility(utility: float, priority: int) -> float:
    return utility * _PRIORITY_FACTOR ** (3 - priority)


@dataclass(slots=True, eq=False)
class RowGroup(ABC):
    """Rows that are scheduled as one: a request, a part of a large one, or several small ones."""

    deadline: float
    """Time by which this stage must complete the first slice."""
    slices: list[RowSlice] = field(default_factory=list)
    """By deadline; the last may be counted in part."""
    rows: int = 0

    @property
    def head(self) -> RowSlice:
        return self.slices[0]

    def add(self, row_slice: RowSlice, rows: int) -> None:
        self.slices.append(row_slice)
        self.rows += rows

    @abstractmethod
    def goes_with(self, other: Self, max_batch_rows: int) -> bool: ...

    @abstractmethod
    def joined(self, other: Self) -> Self: ...


@dataclass(frozen=True, slots=True, eq=False)
class GroupOptions(ABC):
    """Options of a group, the fastest first. Arrays have shape (options,)."""

    indices: Integers
    """In the table that lists them."""
    seconds: Floats
    values: Floats
    first_share: float = field(default=1.0, kw_only=True)
    """Share of the group's value that the first option earns."""

    @abstractmethod
    def serving_options(self, option: int) -> list[tuple[ServingOption, int]]:
        """Return how an option serves the rows: serving options with their rows, the most accurate first."""

    def first_batch_rows(self, serving_option: ServingOption, rows: int) -> int:  # noqa: ARG002 - one batch by default
        return rows


Group = TypeVar("Group", bound=RowGroup)


@dataclass(slots=True, eq=False)
class PlannedGroup(Generic[Group]):
    """A group, or several joined, and its options."""

    group: Group
    options: GroupOptions
    count: int = 1
    """Number of joined groups."""
    joined: list["PlannedGroup[Group]"] = field(default_factory=list)
    """This group joined with those behind it."""

    def job(self, value: float = 0.0, price: float = 0.0) -> Job:
        """Return it as a job of the schedule that is worth `value` plus that of its option."""
        joint = [
            JointOption(other.count, other.options.seconds, other.priced_values(price), other.options.first_share)
            for other in self.joined
        ]
        options = self.options
        return Job(self.group.deadline, options.seconds, self.priced_values(price), value, joint, options.first_share)

    def priced_values(self, price: float) -> Floats:
        return self.options.values - price * self.options.seconds if price else self.options.values

    def chosen(self, step: ProgramStep) -> "PlannedGroup[Group]":
        return self if step.jobs == 1 else next(other for other in self.joined if other.count == step.jobs)


def group_rows(
    view: SchedulerView,
    create: Callable[[float], Group],
    key_of: Callable[[RowSlice], Hashable | None],
    *,
    max_groups: int,
    max_rows: int,
    max_slices: int,
    sizes: Sequence[int] = (),
) -> list[Group]:
    """Return the first groups of the queue, by deadline.

    `key_of`: what the slices of a group have in common; None for a slice that shares none.
    `sizes`: bound of the first, second, … group of several slices; the last counts for all further groups.
    """
    groups: list[Group] = []
    open_groups: dict[Hashable, tuple[Group, int]] = {}
    for row_slice in islice(view.waiting, max_slices):
        key, slice_rows = key_of(row_slice), row_slice.rows
        if key is not None and (entry := open_groups.get(key)) is not None:
            group, capacity = entry
            if group.rows + slice_rows <= capacity:
                group.add(row_slice, slice_rows)
                continue
        deadline = row_slice.request.due_at - view.later_seconds
        if row_slice.provisional_response is not None:
            deadline -= RESPONSE_MARGIN_SECONDS + view.reserved_seconds  # the provisional response is sent then
        for start in range(0, slice_rows, max_rows):
            if len(groups) == max_groups:
                return groups
            groups.append(create(deadline))
            groups[-1].add(row_slice, min(slice_rows - start, max_rows))
        if key is not None:
            open_groups[key] = (groups[-1], sizes[min(len(groups), len(sizes)) - 1])
    return groups


@lru_cache(maxsize=64)
def growing_sizes(max_batch_rows: int) -> tuple[int, ...]:
    """Return group sizes: the most urgent rows form small batches, which may be joined, and later rows full ones."""
    quarter = max(max_batch_rows // 4, 1)
    return 1, quarter, quarter, min(2 * quarter, max_batch_rows), max_batch_rows


def of_free_replica(view: SchedulerView, planned: list[PlannedGroup[Group]]) -> list[PlannedGroup[Group]]:
    free_at = view.free_at()
    if len(free_at) < 2 or not planned:
        return planned
    shares = assign_to_servers([(float(entry.options.seconds[0]), entry.group.deadline) for entry in planned], free_at)
    return [planned[index] for index in shares[0]]


def joined_groups(planned: Sequence[PlannedGroup[Group]], max_batch_rows: int) -> Iterator[tuple[Group, int]]:
    """Yield the first group joined with those directly behind it, and their number."""
    joined = first = planned[0].group
    for count, entry in enumerate(planned[1:], 2):
        other = entry.group
        if joined.rows + other.rows > max_batch_rows or not first.goes_with(other, max_batch_rows):
            return
        joined = joined.joined(other)
        yield joined, count


def spare_seconds(
    planned: Sequence[PlannedGroup[Group]], steps: Sequence[ProgramStep], start: float
) -> tuple[float, float]:
    """Return when all steps are done, and by how many seconds they may be delayed; negative if a deadline is missed."""
    end, spare = start, inf
    for step in steps:
        if step.option != DROPPED:
            chosen = planned[step.first_job].chosen(step)
            end += float(chosen.options.seconds[step.option])
            spare = min(spare, chosen.group.deadline - end)
    return end, spare


def dispatch_first_batch(
    view: SchedulerView, planned: Sequence[PlannedGroup[Group]], steps: Sequence[ProgramStep], spare: float
) -> Dispatch:
    """Dispatch the first step's batch, filled for `spare` seconds with later rows that are served in the same way."""
    first = planned[steps[0].first_job].chosen(steps[0])
    serving_option, rows = first.options.serving_options(steps[0].option)[0]
    point = next(point for point in view.points if point.key == serving_option.point)
    size = first.options.first_batch_rows(serving_option, rows)
    later = ((planned[step.first_job].chosen(step), step) for step in steps[1:] if step.option != DROPPED)
    others = ((entry.group, _rows_served_by(serving_option, entry.options, step)) for entry, step in later)
    return Dispatch(
        point, fill_batch(view, point, first.group, size, others, spare), escalation=serving_option.escalation
    )


def _rows_served_by(serving_option: ServingOption, options: GroupOptions, step: ProgramStep) -> int:
    return sum(
        count
        for option, count in options.serving_options(step.option)
        if option.point == serving_option.point and option.escalation == serving_option.escalation
    )


def fill_batch(
    view: SchedulerView, point: Point, first: Group, size: int, others: Iterable[tuple[Group, int]], spare: float
) -> list[RowSlice]:
    """Return a group's batch, filled for `spare` seconds with rows of later groups, each with how many it may give."""
    row_slices = first_rows(first.slices, size)
    most = view.full_batch_rows
    if spare > 0 and size < most and not first.head.alone:
        filled = rows_within(point, point.seconds(size) + spare, size, most)
        row_slices += first_rows(_extra_slices(first, point, others), filled - size)
    return row_slices


def _extra_slices(first: Group, point: Point, others: Iterable[tuple[Group, int]]) -> Iterator[RowSlice]:
    taken = set(first.slices)
    for group, max_rows in others:
        rows = max_rows
        for row_slice in group.slices:
            if rows <= 0:
                break
            if row_slice not in taken and can_share_batch(point, first.head, row_slice):
                yield row_slice if row_slice.rows <= rows else row_slice.first(rows)
            rows -= row_slice.rows


def can_share_batch(point: Point, head: RowSlice, row_slice: RowSlice) -> bool:
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
