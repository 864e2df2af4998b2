"""Registered tasks: tasks in addition to those of a vision transformer's weights, and their files.

A task file is one safetensors file with `FORM.weight`, `FORM.bias` and, for forms with prompts, `FORM.prompts` for each
form that it was trained for, including `plain`; its metadata hold the task record. Only the header is read here, so
torch is not required.
"""

import json
import re
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.quantity import Seconds
from trimtab_pipelines.resource import Model, Name, is_empty

TASK_INPUT = "task"
"""Input of a stage with the number of each row's task."""
NO_TASK = -1
"""Number of no task. Such a row gets this label and confidence 0."""
METADATA_KEY = "trimtab-task"
"""Metadata key of the task record, as JSON."""
MAX_TASK_FILE_BYTES = 16 * 2**20
MAX_TASKS = 64
"""Per variant."""
MAX_CLASSES = 4096
MAX_TASK_NUMBER = 9999
_DIGEST = r"^sha256:[0-9a-f]{64}$"
REMOVED_SUFFIX, _SUFFIX = ".removed", ".safetensors"
MAX_HEADER_BYTES = 2**20
"""Of a task file's header, which needs many times its size parsed."""
LENGTH_BYTES = 8
"""Of the length of the header, with which a safetensors file begins."""
_FILE = re.compile(r"^(\d{1,4})-([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)\.safetensors$")


class UnusableTask(UserError):
    """An invalid task file."""


class TaskTerms(Model):
    """Defaults of a task's requests."""

    utility: float = Field(default=1.0, ge=0, le=1e9)
    """Value of a response in time. Multiplied by the request's own utility."""
    latency_seconds: Seconds | None = Field(default=None, alias="latency", gt=0)
    """Deadline of requests without one; the pipeline's SLO if absent."""


class Task(TaskTerms):
    """A task in addition to those of the weights. Task numbers continue the weights' numbers in this order."""

    name: Name
    storage_uri: str = Field(default="", max_length=1024)
    """Location of the task file, as for weights; `trimtab train-task` creates one."""
    digest: str | None = Field(default=None, pattern=_DIGEST)
    """SHA-256 that the file must have."""
    removed: bool = Field(default=False, exclude_if=is_empty)
    """Whether the task was removed. The entry remains, so that its number is not reused."""

    @model_validator(mode="after")
    def _require_uri_or_removed(self) -> Self:
        if self.removed == bool(self.storage_uri):
            raise ValueError(f"task {self.name}: set either storageUri or removed: true")
        return self


class TaskRecord(TaskTerms):
    """Metadata of a task file."""

    classes: tuple[Annotated[str, Field(max_length=256)], ...] = Field(min_length=2, max_length=MAX_CLASSES)
    transformer: str = Field(pattern=_DIGEST)
    """SHA-256 of the transformer that the task was trained on."""
    accuracy_by_point: dict[Name, Accuracy] = Field(default_factory=dict, max_length=32)


def parse_task_record(content: bytes) -> TaskRecord:
    """Parse the record of a task file, from the complete file or its first bytes.

    Raises UnusableTask if the file is invalid.
    """
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    if len(content) < LENGTH_BYTES or length > len(content) - LENGTH_BYTES:
        raise UnusableTask("not a safetensors file; `trimtab train-task` creates task files")
    if length > MAX_HEADER_BYTES:
        raise UnusableTask(f"its header has {length} bytes; at most {MAX_HEADER_BYTES} are accepted")
    try:
        header = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + length])
        return TaskRecord.model_validate_json(header["__metadata__"][METADATA_KEY])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UnusableTask(f"task record: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnusableTask(
            f"no {METADATA_KEY!r} in the file's metadata; `trimtab train-task` creates task files"
        ) from error


def file_name(number: int, name: str) -> str:
    return f"{number}-{name}{_SUFFIX}"


def removed_marker_name(number: int, name: str) -> str:
    """Name of the file that marks the number of a removed task as used, in a folder of tasks."""
    return f"{number}-{name}{REMOVED_SUFFIX}"


def parse_removed_marker(file: str) -> tuple[int, str] | None:
    """Number and name of a removed task's marker; None for any other file."""
    return parse_file_name(f"{file.removesuffix(REMOVED_SUFFIX)}{_SUFFIX}") if file.endswith(REMOVED_SUFFIX) else None


def parse_file_name(file: str) -> tuple[int, str] | None:
    """Number and name of a task's file; None for any other file."""
    match = _FILE.match(file)
    return (int(match[1]), match[2]) if match else None
