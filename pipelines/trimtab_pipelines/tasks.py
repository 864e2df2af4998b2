"""Tasks that join those a vision transformer's weights hold: how they are named, and what their files tell. Pure.

A task file is one safetensors file: `WAY.weight`, `WAY.bias` and, where the way has prompts, `WAY.prompts` for each way
that it was trained for, `plain` among them; its metadata hold the card. Only the header is read here, so that nobody
needs torch to know a task.
"""

import json
import re
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.quantity import Seconds
from trimtab_pipelines.resource import Model, Name

TASK_INPUT = "task"
"""The input of a stage that tells its model which task each row is of, by number."""
NO_TASK = -1
"""The number of no task: a row of it is answered with this label and confidence 0."""
METADATA_KEY = "trimtab-task"
"""The metadata's key under which a card stands, as JSON."""
MAX_TASK_FILE_BYTES = 16 * 2**20
"""Of a task file."""
MAX_TASKS = 64
"""Of one variant."""
MAX_CLASSES = 4096
MAX_TASK_NUMBER = 9999
_DIGEST = r"^sha256:[0-9a-f]{64}$"
REMOVED_SUFFIX, _SUFFIX = ".removed", ".safetensors"
_LENGTH_BYTES = 8
_FILE = re.compile(r"^(\d{1,4})-([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)\.safetensors$")


class UnusableTask(UserError):
    """What should be a task file is none."""


class TaskTerms(Model):
    """What requests of a task are granted that do not ask for anything else."""

    utility: float = Field(
        default=1.0, ge=0, le=1e9, description="Worth of an answer in time; a request's own utility multiplies it"
    )
    latency_seconds: Seconds | None = Field(
        default=None, alias="latency", gt=0, description="Deadline of requests without one; else the pipeline's SLO"
    )


class Task(TaskTerms):
    """A task beside those of the weights; their numbers go on from the weights' own, in this order."""

    name: Name
    storage_uri: str = Field(
        default="",
        max_length=1024,
        description="Where its file is, as of weights; `trimtab train-task` writes one",
    )
    digest: str | None = Field(default=None, pattern=_DIGEST, description="Refuse a file whose SHA-256 is another")
    removed: bool = Field(
        default=False,
        exclude_if=lambda gone: not gone,
        description="It was deleted: nobody answers it, and the line stands so that no other task gets its number",
    )

    @model_validator(mode="after")
    def _require_uri_or_removed(self) -> Self:
        if self.removed == bool(self.storage_uri):
            raise ValueError(f"task {self.name}: give either a storageUri or removed: true")
        return self


class TaskRecord(TaskTerms):
    """What a task file tells of itself."""

    classes: tuple[Annotated[str, Field(max_length=256)], ...] = Field(min_length=2, max_length=MAX_CLASSES)
    transformer: str = Field(pattern=_DIGEST, description="The transformer that it was trained on")
    accuracy_by_point: dict[Name, Accuracy] = Field(default_factory=dict, max_length=32)


def parse_task_record(content: bytes) -> TaskRecord:
    """Read the card of a task file, given whole or by its first bytes.

    Raises:
        UnusableTask: saying what is wrong with it.
    """
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if len(content) < _LENGTH_BYTES or length > len(content) - _LENGTH_BYTES:
        raise UnusableTask("this is no safetensors file; `trimtab train-task` writes task files")
    try:
        header = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return TaskRecord.model_validate_json(header["__metadata__"][METADATA_KEY])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UnusableTask(f"the card of the task: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnusableTask(
            f"a file without {METADATA_KEY!r} among its metadata; `trimtab train-task` writes one"
        ) from error


def file_name(number: int, name: str) -> str:
    """The name of a task's file in a folder of tasks."""
    return f"{number}-{name}{_SUFFIX}"


def removed_marker_name(number: int, name: str) -> str:
    """The name of the file that says of a deleted task that its number was given away, in a folder of tasks."""
    return f"{number}-{name}{REMOVED_SUFFIX}"


def parse_removed_marker(file: str) -> tuple[int, str] | None:
    """Read what `removed_marker_name` wrote; None for any other file."""
    return parse_file_name(f"{file.removesuffix(REMOVED_SUFFIX)}{_SUFFIX}") if file.endswith(REMOVED_SUFFIX) else None


def parse_file_name(file: str) -> tuple[int, str] | None:
    """Read what `file_name` wrote; None for any other file."""
    found = _FILE.match(file)
    return (int(found[1]), found[2]) if found else None
