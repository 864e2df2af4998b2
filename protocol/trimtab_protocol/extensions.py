"""Trimtab's headers and parameters in protocol messages."""

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from trimtab_pipelines.accuracy_evidence import DIGESTS, Accuracy

# Headers of responses, and of requests forwarded by the proxy.
CLIENT_HEADER = "x-trimtab-client"
"""Client identity set by the proxy: `key:NAME`, `token:ISSUER:SUBJECT`, or an address. Values of clients are removed.
"""
STAGE_HEADER = "x-trimtab-stage"
"""The stage in which a request ended without a result."""
REASON_HEADER = "x-trimtab-reason"
"""Reason of a refusal by the proxy or the router."""

# Request parameters. The first two are not specific to Trimtab.
TIMEOUT = "timeout"
"""Microseconds from arrival to response."""
PRIORITY = "priority"
"""1 is the highest; 0 means no priority."""
EXTENSION_PREFIX = "trimtab."
ACCURACY_FLOOR = "trimtab.accuracy_floor"
ACCURACY_PROBABILITY = "trimtab.accuracy_probability"
UTILITY = "trimtab.utility"
TASK = "trimtab.task"
REQUEST_EXTENSIONS = (ACCURACY_FLOOR, ACCURACY_PROBABILITY, UTILITY, TASK)
"""Known extensions; other parameters with the prefix are rejected, so that misspelt ones are noticed."""

# Parameters of a batch and of a replica's response.
OPERATING_POINT = "operating_point"
COMPUTE_SECONDS = "compute_seconds"
WAITED_SECONDS = "waited_seconds"
"""Time spent behind earlier batches of the replica."""

# Response parameters.
EXPECTED_ACCURACY = "trimtab.expected_accuracy"
ESCALATION_PENDING = "trimtab.escalation_pending"
"""True if rows were returned before their escalation; absent otherwise."""
PLAN_GENERATION = "trimtab.plan_generation"

# Parameters of a model's metadata and of its inputs.
OPTIONAL = "trimtab.optional"
"""True for inputs that a request may omit; absent otherwise."""
TASKS = "tasks"
"""Tasks of a model by number, separated by commas; unused numbers are empty."""
REJECTED_TASK_FILES = "rejected_task_files"
"""Rejected task files with the reason: a JSON object by file name. Absent if there are none."""
TASK_ACCURACIES = "task_accuracies"
"""Accuracies on registered tasks: a JSON object by task and operating point. Absent if unknown."""
TaskPointAccuracy = Mapping[str, Mapping[str, Accuracy]]
"""By task and operating point."""
_TASK_ACCURACIES_ADAPTER = TypeAdapter(dict[str, dict[str, Accuracy]])


def task_metadata(
    names: Sequence[str], refused: Mapping[str, str], accuracies: TaskPointAccuracy = MappingProxyType({})
) -> dict[str, str]:
    """Metadata parameters of a model with several tasks: names by number, and why files were rejected, by name.

    Accuracies are those of task records, without the digests of samples.
    """
    parameters = {TASKS: ",".join(names)}
    if refused:
        parameters[REJECTED_TASK_FILES] = json.dumps(dict(refused))
    known = {
        task: {
            point: accuracy.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=DIGESTS)
            for point, accuracy in by_point.items()
        }
        for task, by_point in accuracies.items()
        if by_point
    }
    return parameters | ({TASK_ACCURACIES: json.dumps(known)} if known else {})


def parse_tasks(facts: Mapping[str, object]) -> list[str]:
    """Tasks of a model by number; empty without tasks."""
    tasks = facts.get(TASKS)
    return tasks.split(",") if isinstance(tasks, str) and tasks else []


def parse_rejected_task_files(facts: Mapping[str, object]) -> dict[str, str]:
    """Reasons of rejected task files by name; empty if the metadata are not Trimtab's."""
    content = facts.get(REJECTED_TASK_FILES)
    try:
        reasons = json.loads(content) if isinstance(content, str) else {}
    except (ValueError, RecursionError):
        return {}
    return {name: str(reason) for name, reason in reasons.items()} if isinstance(reasons, dict) else {}


def parse_task_accuracies(facts: Mapping[str, object]) -> TaskPointAccuracy:
    """Accuracies on registered tasks; empty if the metadata are not Trimtab's."""
    content = facts.get(TASK_ACCURACIES)
    return _parse_task_accuracies(content) if isinstance(content, str) else {}


@lru_cache(maxsize=64)
def _parse_task_accuracies(content: str) -> TaskPointAccuracy:
    """Cached, since replicas report the same text repeatedly."""
    try:
        return _TASK_ACCURACIES_ADAPTER.validate_json(content)
    except ValidationError:
        return {}


class PointParameters(NamedTuple):
    """Names of the metadata parameters of one operating point."""

    modalities: str
    accuracy: str
    accuracy_source: str


def point_parameters(stage: str, variant: str, point: str) -> PointParameters:
    return PointParameters(*(f"trimtab.{stage}.{variant}.{point}.{name}" for name in PointParameters._fields))


def parse_number(parameter: object) -> float | None:
    """The number in a response parameter, which may be text over gRPC; None for anything else."""
    if isinstance(parameter, bool) or not isinstance(parameter, int | float | str):
        return None
    try:
        return float(parameter)
    except ValueError:
        return None


class StageParameters(NamedTuple):
    """Names of the response parameters of one stage.

    Variants, operating points, confidences, escalated rows and pending escalations are reported by row, separated by
    commas, only if rows ran on several variants, at several points, the model reports confidence, a row was escalated,
    or an escalation did not complete.
    The task is reported if the request named one.
    """

    variant: str
    operating_point: str
    batch_size: str
    queue_seconds: str
    service_seconds: str
    variants: str
    operating_points: str
    confidences: str
    escalated: str
    escalation_pending: str
    task: str


@cache
def parameters_of(stage: str) -> StageParameters:
    return StageParameters(*(f"trimtab.{stage}.{name}" for name in StageParameters._fields))
