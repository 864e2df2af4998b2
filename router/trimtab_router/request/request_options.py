"""What a request wishes beyond its answer: time, accuracy, a task, and what it is worth. Pure.

The wishes come as parameters of the protocol. Numbers may be written as text, since not every client can send all
kinds of them.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from trimtab_pipelines.accuracy_floor import required_mean
from trimtab_pipelines.tasks import TaskClass
from trimtab_protocol import Parameters
from trimtab_protocol.extensions import (
    ACCURACY_FLOOR,
    ACCURACY_PROBABILITY,
    OWN_PREFIX,
    PRIORITY,
    TASK,
    TIMEOUT,
    UTILITY,
    WISHES,
)
from trimtab_router.refusal import invalid

_LONGEST_MICROSECONDS = 10**15
_LONGEST_TASK = 128
_MOST_UTILITY = 1e9
DEFAULT_PRIORITY, LEAST_PRIORITY = 3, 5


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What one request asks for; the defaults ask for nothing.

    Attributes:
        timeout_seconds: from arrival to answer; None where the promise of the pipeline is enough.
        accuracy_floor: the least accuracy of its rows, 0 … 1.
        accuracy_probability: how surely the share of its rows that are right keeps the floor; None: on average.
        utility: what its answer in time is worth, compared with others.
        task: the task its rows belong to; empty where it names none.
        priority: 1 (highest) … 5.
    """

    timeout_seconds: float | None = None
    accuracy_floor: float = 0.0
    accuracy_probability: float | None = None
    utility: float = 1.0
    task: str = ""
    priority: int = DEFAULT_PRIORITY

    @property
    def plain(self) -> bool:
        """Whether it asks for no more than an answer in time."""
        return not self.accuracy_floor and not self.task and self.utility == 1.0 and self.priority == DEFAULT_PRIORITY

    def least_accuracy(self, rows: int) -> float:
        """The least expected accuracy that grants the floor to so many rows."""
        return required_mean(self.accuracy_floor, rows, self.accuracy_probability)


NO_WISH = RequestOptions()


class ServiceTerms(NamedTuple):
    """On which one request is served.

    Attributes:
        wish: what it asks for, with what its task grants.
        deadline: absolute, in seconds of whoever's clock tells when it arrived.
        ends_by: as `deadline`, for what comes after the first piece of an answer that is written; None: no later.
    """

    wish: RequestOptions
    deadline: float
    ends_by: float | None = None


def parse_request_options(parameters: Parameters) -> RequestOptions:
    """The wishes among a request's parameters.

    Raises:
        Refusal: INVALID_ARGUMENT naming the parameter that is unknown, out of range or contradicts another.
    """
    if not parameters:
        return NO_WISH
    for name in parameters:
        if name.startswith(OWN_PREFIX) and name not in WISHES:
            raise invalid(f"unknown parameter {name!r}; those of ours are: {', '.join(WISHES)}")
    wish = RequestOptions(
        timeout_seconds=_timeout_seconds(parameters),
        accuracy_floor=_number(parameters, ACCURACY_FLOOR, 0.0, most=1.0),
        accuracy_probability=_probability(parameters),
        utility=_number(parameters, UTILITY, 1.0, most=_MOST_UTILITY),
        task=_task(parameters),
        priority=_priority(parameters),
    )
    return NO_WISH if wish == NO_WISH else wish


def apply_task_terms(wish: RequestOptions, task: TaskClass | None) -> RequestOptions:
    """A wish with what its task grants: the task's worth times its own, the task's deadline where it has none."""
    if task is None:
        return wish
    own = wish.timeout_seconds
    return replace(
        wish,
        utility=wish.utility * task.utility,
        timeout_seconds=task.latency_seconds if own is None else own,
    )


def earliest_deadline(first: float | None, second: float | None) -> float | None:
    """The shorter of two times; None where neither is given."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def _timeout_seconds(parameters: Parameters) -> float | None:
    """None where it is absent or 0."""
    timeout = parameters.get(TIMEOUT, 0)
    if not isinstance(timeout, int) or isinstance(timeout, bool):
        raise invalid(f"parameter 'timeout' is {timeout!r}; it must be an integer number of microseconds")
    if timeout < 0:
        raise invalid(f"parameter 'timeout' is {timeout}; it must be at least 0 microseconds (0 means the SLO)")
    return min(timeout, _LONGEST_MICROSECONDS) / 1e6 if timeout else None


def _probability(parameters: Parameters) -> float | None:
    if ACCURACY_PROBABILITY not in parameters:
        return None
    probability = _number(parameters, ACCURACY_PROBABILITY, 0.0, most=1.0)
    if not 0.0 < probability < 1.0:
        raise invalid(f"parameter {ACCURACY_PROBABILITY!r} is {probability:g}; it must be above 0 and below 1")
    if ACCURACY_FLOOR not in parameters:
        raise invalid(f"parameter {ACCURACY_PROBABILITY!r} is of a floor; send {ACCURACY_FLOOR!r} too")
    return probability


def _priority(parameters: Parameters) -> int:
    """Also the default where it is 0, as with Triton."""
    level = _number(parameters, PRIORITY, 0.0, most=float(LEAST_PRIORITY))
    if level != int(level):
        raise invalid(f"parameter {PRIORITY!r} is {level:g}; it must be an integer, 1 (highest) to {LEAST_PRIORITY}")
    return int(level) or DEFAULT_PRIORITY


def _task(parameters: Parameters) -> str:
    task = parameters.get(TASK, "")
    if not isinstance(task, str):
        raise invalid(f"parameter {TASK!r} is {task!r}; it must be the name of a task")
    if len(task) > _LONGEST_TASK:
        raise invalid(f"parameter {TASK!r} has {len(task)} characters; a task's name has at most {_LONGEST_TASK}")
    return task


def _number(parameters: Parameters, name: str, default: float, *, most: float) -> float:
    """A number from 0 to `most`, as such or as text."""
    given = parameters.get(name, default)
    try:
        number = float("nan") if isinstance(given, bool) else float(given)
    except (ValueError, OverflowError):
        number = float("nan")
    if not 0.0 <= number <= most:
        raise invalid(f"parameter {name!r} is {given!r}; it must be a number from 0 to {most:g}")
    return number
