"""Names of ours that travel with the protocol's messages, each spelled here alone. Pure."""

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from trimtab_pipelines.accuracy_evidence import Accuracy

# Headers of answers, and of requests that the door passes on.
CLIENT_HEADER = "x-trimtab-client"
"""Who the door says is calling: `key:NAME`, `token:ISSUER:SUBJECT`, or an address. What callers write is not kept."""
STAGE_HEADER = "x-trimtab-stage"
"""The stage where a request ended without a result."""
REASON_HEADER = "x-trimtab-reason"
"""Why a request was refused, by the door or by the router."""

# Parameters of a caller's request: its wishes. The first two are those that others know too.
TIMEOUT = "timeout"
"""Microseconds from arrival to answer."""
PRIORITY = "priority"
"""1 is the highest; 0 means none in particular."""
EXTENSION_PREFIX = "trimtab."
ACCURACY_FLOOR = "trimtab.accuracy_floor"
ACCURACY_PROBABILITY = "trimtab.accuracy_probability"
UTILITY = "trimtab.utility"
TASK = "trimtab.task"
REQUEST_EXTENSIONS = (ACCURACY_FLOOR, ACCURACY_PROBABILITY, UTILITY, TASK)
"""Those of ours; others that begin as they do are refused, since a misspelt wish would be none."""

# Parameters of a batch and of a replica's answer.
OPERATING_POINT = "operating_point"
COMPUTE_SECONDS = "compute_seconds"
WAITED_SECONDS = "waited_seconds"
"""For batches that came to the replica before."""

# Parameters of an answer to a caller.
EXPECTED_ACCURACY = "trimtab.expected_accuracy"
ESCALATION_PENDING = "trimtab.escalation_pending"
"""True where rows were answered before the second look that was meant for them; absent where none was."""
PLAN_GENERATION = "trimtab.plan_generation"

# Parameters of a model's metadata; those of an input stand at the input.
OPTIONAL = "trimtab.optional"
"""True of an input that a request may leave out; absent from the others."""


TASKS = "tasks"
"""The tasks of a model that serves several, by number and parted by commas; nothing stands for a number not given."""
REJECTED_TASK_FILES = "rejected_task_files"
"""Which files of tasks a model leaves out, and why: a JSON object by their names. Absent where it took all."""


TASK_ACCURACIES = "task_accuracies"
"""How accurate operating points are on tasks that joined a model: a JSON object by task and point. Absent where nothing
is known."""
TaskPointAccuracy = Mapping[str, Mapping[str, Accuracy]]
"""By task and operating point."""
_TASK_ACCURACIES_ADAPTER = TypeAdapter(dict[str, dict[str, Accuracy]])


def task_metadata(
    names: Sequence[str], refused: Mapping[str, str], judged: TaskPointAccuracy = MappingProxyType({})
) -> dict[str, str]:
    """What a model that serves several tasks tells of them, as parameters of its metadata.

    Args:
        names: by number.
        refused: why files are left out, by their names.
        judged: as the cards of tasks tell; the digests of samples stay there.
    """
    told = {TASKS: ",".join(names)}
    if refused:
        told[REJECTED_TASK_FILES] = json.dumps(dict(refused))
    known = {
        task: {
            point: one.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"samples_digest"})
            for point, one in by_point.items()
        }
        for task, by_point in judged.items()
        if by_point
    }
    return told | ({TASK_ACCURACIES: json.dumps(known)} if known else {})


def parse_tasks(facts: Mapping[str, object]) -> list[str]:
    """The tasks that a model tells, by number; none where it tells of none."""
    told = facts.get(TASKS)
    return told.split(",") if isinstance(told, str) and told else []


def parse_rejected_task_files(facts: Mapping[str, object]) -> dict[str, str]:
    """Why a model leaves files of tasks out, by their names; nothing where it says so otherwise than ours do."""
    told = facts.get(REJECTED_TASK_FILES)
    try:
        found = json.loads(told) if isinstance(told, str) else {}
    except (ValueError, RecursionError):
        return {}
    return {name: str(why) for name, why in found.items()} if isinstance(found, dict) else {}


def parse_task_accuracies(facts: Mapping[str, object]) -> TaskPointAccuracy:
    """How accurate a model says its points are on tasks; nothing where it says so otherwise than ours do."""
    told = facts.get(TASK_ACCURACIES)
    return _parse_task_accuracies(told) if isinstance(told, str) else {}


@lru_cache(maxsize=64)
def _parse_task_accuracies(told: str) -> TaskPointAccuracy:
    """Read once what replicas tell again and again."""
    try:
        return _TASK_ACCURACIES_ADAPTER.validate_json(told)
    except ValidationError:
        return {}


class PointParameters(NamedTuple):
    """The names under which metadata tells what one operating point reads, how accurate it is, and what that is of."""

    modalities: str
    accuracy: str
    accuracy_source: str


def point_parameters(stage: str, variant: str, point: str) -> PointParameters:
    """The names of one operating point's parameters."""
    return PointParameters(*(f"trimtab.{stage}.{variant}.{point}.{name}" for name in PointParameters._fields))


def parse_number(parameter: object) -> float | None:
    """The number that a parameter of an answer is: over gRPC fractions go as text. None for anything else."""
    if isinstance(parameter, bool) or not isinstance(parameter, int | float | str):
        return None
    try:
        return float(parameter)
    except ValueError:
        return None


class StageParameters(NamedTuple):
    """The names under which an answer tells how one stage served it.

    Three of the last four tell it row by row, parted by commas, and stand only where there is something to tell: rows
    that ran at different points, a model that says how certain it is, rows whose second look did not come. The last
    stands where the request named a task of the stage's model.
    """

    variant: str
    operating_point: str
    batch_size: str
    queue_seconds: str
    service_seconds: str
    operating_points: str
    confidences: str
    escalation_pending: str
    task: str


@cache
def parameters_of(stage: str) -> StageParameters:
    """The names of one stage's parameters."""
    return StageParameters(*(f"trimtab.{stage}.{name}" for name in StageParameters._fields))
