"""Forms the next batch of a stage: whom to drop, how many rows leave.

Work-conserving: called when a replica is free, it lets up to the planned rows leave, most urgent first, but no more
than the most urgent of them can afford. Only when the backlog is more than the replicas can serve in time is an urgent
slice that would shrink the batch dropped instead: else each batch would shrink to save one request and many others
would be late for it. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trimtab_router.stage.queue import DeadlineQueue
from trimtab_router.stage.work import Slice

_LOOKED_AT = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)

DropPolicy = Literal["Predicted", "Past", "Never"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a batch of a stage must keep to.

    `service_seconds` predicts a batch by its rows and never falls with them; `later_seconds` is what the stages after
    this one will take.
    """

    max_rows: int
    service_seconds: Callable[[int], float]
    later_seconds: float
    drop_policy: DropPolicy
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Formed:
    """The slices that leave together, and those that were dropped."""

    batch: list[Slice]
    dropped: list[Slice]


def form_batch(queue: DeadlineQueue, now: float, terms: Terms) -> Formed:
    """Take the next batch out of the queue; empty where nothing (or nothing that can make it) is left."""
    dropped = drop_hopeless(queue, now, terms)
    while (head := queue.head()) is not None:
        full = min(terms.max_rows, queue.rows_beside(head))
        fitting = full if terms.drop_policy == "Never" else _fitting_rows(head, full, now, terms)
        if terms.drop_policy == "Predicted" and 0 < fitting < full and _overloaded(queue, head, now, terms):
            dropped.append(queue.pop())
            continue
        return Formed(queue.take(fitting or full), dropped)
    return Formed([], dropped)


def drop_hopeless(queue: DeadlineQueue, now: float, terms: Terms) -> list[Slice]:
    """Remove the slices whose time, by the drop policy, has come."""
    dropped: list[Slice] = []
    while (head := queue.head()) is not None and drop_time(head, terms) < now:
        dropped.append(queue.pop())
    return dropped


def drop_time(piece: Slice, terms: Terms) -> float:
    """The moment after which the slice is dropped if it has not left."""
    match terms.drop_policy:
        case "Never":
            return float("inf")
        case "Past":
            return piece.work.deadline
        case "Predicted":
            return piece.work.deadline - terms.service_seconds(min(piece.rows, terms.max_rows)) - terms.later_seconds


def _fitting_rows(head: Slice, full: int, now: float, terms: Terms) -> int:
    """The most rows whose batch ends in time for its most urgent slice, by bisection; 0 where not even one does."""
    slack = head.work.deadline - now - terms.later_seconds
    if terms.service_seconds(full) <= slack:
        return full
    low, high = 0, full
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if terms.service_seconds(middle) <= slack else (low, middle)
    return low


def _overloaded(queue: DeadlineQueue, head: Slice, now: float, terms: Terms) -> bool:
    """Whether full batches by all replicas would not get to everybody's rows in time.

    Looked at in a few places along the queue: the most patient cannot hide what those before them suffer. The very
    first are left out, since whoever is hopeless there is dropped anyway.
    """
    row_seconds = terms.service_seconds(terms.max_rows) / terms.max_rows / max(terms.replicas, 1)
    for share in _LOOKED_AT:
        deadline, rows = queue.deadline_at(head, share)
        if now + rows * row_seconds + terms.later_seconds > deadline:
            return True
    return False
