"""`TaskStore`: tasks registered at run time, as files that the replicas watch.

A task is registered once its file is stored: replicas load it when they notice it, and later replicas find it. A
failure of all replicas, or of the router, loses no task. A task that a replica rejects while its client waits is
removed. A deleted task leaves a marker, so that its index is not reused: requests that name it may still be in flight,
and a replica that notices the deletion late still serves them as that task.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.resource import Name
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tasks import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_TASKS,
    TaskRecord,
    UnusableTask,
    file_name,
    parse_file_name,
    parse_removed_marker,
    parse_task_record,
    removed_marker_name,
)
from trimtab_protocol.extensions import parse_rejected_task_files, parse_tasks
from trimtab_router.execution.task_registry import NO_TASK_INPUT, task_source
from trimtab_router.router import Router

log = logging.getLogger(__name__)

LOAD_SECONDS = 5.0
"""Time to wait for the replicas before a registration or deletion is reported as pending."""
POLL_SECONDS = 0.02
_TASK_NAME = TypeAdapter[str](Name)
Files = Mapping[str, bytes]
"""Contents by file name; of a task's file at least its header."""
Changes = Mapping[str, bytes | None]
"""New contents by file name; None removes the file."""


class TaskRefused(Exception):
    """A task that is not registered or not deleted, with the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """A registered task."""

    index: int
    """Index of the task in the input `task`."""
    record: TaskRecord
    """Contents of its file."""
    replicas: int = 0
    """Replicas that have loaded it."""
    waiting: int = 0
    """Replicas that have not loaded it yet."""
    rejection: str = ""
    """Reason of a replica that rejects it."""


class TaskFiles(Protocol):
    """Files of each variant's tasks, which its replicas watch: `TaskFolder` or `TaskConfigMaps`."""

    async def read(self, stage: str, variant: str) -> Files: ...

    async def write(self, stage: str, variant: str, files: Files, changes: Changes) -> Files | None:
        """Change files that were read; return the new ones, or None if another router has changed them since."""
        ...


class TaskFolder:
    """Task files of one machine, written by one router: STAGE/VARIANT/INDEX-NAME.safetensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def read(self, stage: str, variant: str) -> Files:
        paths = (self._folder / stage / variant).glob("*")
        return await asyncio.to_thread(lambda: {path.name: _read_header(path) for path in paths if path.is_file()})

    async def write(self, stage: str, variant: str, files: Files, changes: Changes) -> Files | None:
        for name, content in changes.items():
            path = self._folder / stage / variant / name
            if content is None:
                path.unlink(missing_ok=True)
            else:
                await asyncio.to_thread(write_atomically, path, content)
        return {name: content for name, content in {**files, **changes}.items() if content is not None}


class TaskStore:
    """Registered tasks of a pipeline."""

    def __init__(self, router: Router, files: TaskFiles) -> None:
        self._router = router
        self._files = files
        self._changing = asyncio.Lock()
        self._applying = asyncio.Lock()
        self.tasks: dict[tuple[str, str], dict[str, RegisteredTask]] = {}
        """By (stage, variant), then by name."""
        self._files_of: dict[tuple[str, str], Files] = {}
        """Files that `tasks` was made of, by (stage, variant)."""
        self._next_indices: dict[tuple[str, str], int] = {}
        """First index that follows those of a variant's files."""

    async def read(self) -> None:
        """Load the tasks registered or deleted before this router started."""
        for stage in self._router.pipeline.spec.stages:
            try:
                await self._read(stage)
            except TaskRefused as error:
                log.warning("stage %s: %s", stage.name, error)

    async def _read(self, stage: Stage) -> None:
        for variant in stage.variants_with_tasks:
            await self.apply(stage.name, variant.name, await self._files.read(stage.name, variant.name))

    async def apply(self, stage: str, variant: str, files: Files) -> None:
        """Register the tasks of a variant's current files, and unregister all others."""
        declared = {task.name for task in self._router.pipeline.spec.stage(stage).variant(variant).loaded_tasks}
        removed = list(filter(None, map(parse_removed_marker, files)))
        async with self._applying:  # in the order of the calls: later files are newer
            tasks = await asyncio.to_thread(_parse_tasks, f"{stage}/{variant}", files, declared)
            known = self.tasks.get((stage, variant), {})
            changed = {name for name, task in known.items() if tasks.get(name) != task}
            for name in changed | ({name for _, name in removed} - tasks.keys() - declared):
                self._router.tasks.unregister(stage, variant, name)
            for name, task in tasks.items():
                self._router.tasks.register(stage, variant, name, task.record)
            self.tasks[stage, variant], self._files_of[stage, variant] = tasks, files
            used = [*filter(None, map(parse_file_name, files)), *removed]
            self._next_indices[stage, variant] = max((index + 1 for index, _ in used), default=0)

    async def register(self, stage: str, variant: str, name: str, content: bytes) -> RegisteredTask:
        """Register a task on all replicas, permanently.

        Raises TaskRefused: 400 for an invalid file or name, 404 for an unknown variant, 409 for an existing task, 413
        if there is no room for it, 503 if no replica is ready to check it or its file cannot be stored.
        """
        owner = self._stage(stage, variant)
        await asyncio.to_thread(_validate, owner, variant, name, content)
        async with self._changing:
            metadata = await self._router.model_metadata(stage, variant)
            reported = {task for parameters in metadata.values() for task in parse_tasks(parameters)}
            free = await self._first_unreported_index(owner)
            await self._read(owner)

            def add() -> Changes:
                if name in self.tasks[stage, variant].keys() | reported:
                    raise TaskRefused(409, f"variant {variant} of stage {stage} has a task {name!r} already")
                if len(self.tasks[stage, variant]) == MAX_TASKS:
                    raise TaskRefused(409, f"there are {MAX_TASKS} tasks, the maximum")
                if not metadata:
                    raise TaskRefused(503, f"no replica is ready for variant {variant} of stage {stage}; try again")
                return {file_name(self._choose_index(stage, name, free), name): content}

            await self._change(owner, variant, add)
            task = self.tasks[stage, variant][name]
            removal: Changes = {file_name(task.index, name): None}
            await self._read(owner)
            if self._is_index_shared(stage, name, task.index):  # another router chose it for another variant
                await self._change(owner, variant, lambda: removal)
                raise TaskRefused(409, f"another task got the number of {name!r} at the same time; try again")
            task = await self._wait_for_replicas(
                stage, variant, name, task, lambda task: bool(task.rejection) or task.waiting == 0 < task.replicas
            )
            if task.rejection:
                await self._change(owner, variant, lambda: removal)
                raise TaskRefused(400, f"task {name!r}: {task.rejection}")
            return task

    async def delete(self, stage: str, variant: str, name: str) -> RegisteredTask:
        """Delete a task on all replicas, permanently. Its index is not reused.

        Returns the task, with the numbers of replicas that have and have not unloaded it. Raises TaskRefused: 404 if
        the task is not registered, 503 if the change cannot be stored.
        """
        owner = self._stage(stage, variant)
        async with self._changing:
            await self._read(owner)
            task = self.tasks.get((stage, variant), {}).get(name)
            if task is None:
                raise TaskRefused(404, f"variant {variant} of stage {stage}: no task {name!r} is registered")
            changes = {removed_marker_name(task.index, name): b"", file_name(task.index, name): None}
            await self._change(owner, variant, lambda: changes)
            task = await self._wait_for_replicas(
                stage, variant, name, task, lambda task: task.replicas == 0 < task.waiting
            )
            return replace(task, replicas=task.waiting, waiting=task.replicas)

    async def _wait_for_replicas(
        self, stage: str, variant: str, name: str, task: RegisteredTask, is_done: Callable[[RegisteredTask], bool]
    ) -> RegisteredTask:
        """A task as replicas report it, once that meets a condition, else after LOAD_SECONDS."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOAD_SECONDS
        while True:
            task = as_reported(name, task, (await self._router.model_metadata(stage, variant)).values())
            if is_done(task) or loop.time() > deadline:
                return task
            await asyncio.sleep(POLL_SECONDS)

    async def _change(self, owner: Stage, variant: str, decide: Callable[[], Changes]) -> None:
        """Write the changes that `decide` makes of the current tasks, again if another router was faster."""
        while True:
            read = self._files_of[owner.name, variant]
            if (files := await self._files.write(owner.name, variant, read, decide())) is not None:
                break
            await self._read(owner)
        await self.apply(owner.name, variant, files)

    def _stage(self, stage: str, variant: str) -> Stage:
        try:
            owner = self._router.pipeline.spec.stage(stage)
            owner.variant(variant)
        except KeyError as error:
            raise TaskRefused(404, str(error.args[0])) from error
        return owner

    async def _first_unreported_index(self, stage: Stage) -> int:
        """First index that no task has that a replica of a stage reports."""
        variants = [await self._router.model_metadata(stage.name, variant.name) for variant in stage.variants]
        return max((len(parse_tasks(replica)) for metadata in variants for replica in metadata.values()), default=0)

    def _choose_index(self, stage: str, name: str, free: int) -> int:
        """Index of the task in another variant of its stage, else the next free one."""
        indices = (tasks[name].index for (owner, _), tasks in self.tasks.items() if owner == stage and name in tasks)
        stored = (index for (owner, _), index in self._next_indices.items() if owner == stage)
        return next(indices, max([free, *stored]))

    def _is_index_shared(self, stage: str, name: str, index: int) -> bool:
        """Whether a task of another name has an index, which must be unique among all variants of a stage."""
        tasks = (tasks for (owner, _), tasks in self.tasks.items() if owner == stage)
        return any(task.index == index and other != name for each in tasks for other, task in each.items())


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        return length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))


def _validate(stage: Stage, variant: str, name: str, content: bytes) -> None:
    if task_source(stage) is None:
        raise TaskRefused(400, f"task {name!r}: {NO_TASK_INPUT.format(stage=stage.name)}")
    if stage.variant(variant) not in stage.variants_with_tasks:
        raise TaskRefused(400, f"task {name!r}: variant {variant} is a container of its own, which takes no tasks")
    try:
        _TASK_NAME.validate_python(name)
        record = parse_task_record(content)
    except ValidationError as error:
        raise TaskRefused(400, f"task {name!r}: a name has lower-case letters, digits and dashes") from error
    except UnusableTask as error:
        raise TaskRefused(400, f"task {name!r}: {error}") from error
    points = {point.name for point in stage.variant(variant).points}
    unknown = sorted(record.accuracy_by_point.keys() - points)
    if unknown:
        raise TaskRefused(
            400, f"task {name!r}: unknown operating point {unknown[0]!r}; known: {', '.join(sorted(points))}"
        )


def as_reported(name: str, task: RegisteredTask, metadata: Collection[Mapping[str, Any]]) -> RegisteredTask:
    """A task with what the metadata of its variant's replicas report."""
    loaded = sum(name in parse_tasks(parameters) for parameters in metadata)
    file = Path(file_name(task.index, name)).stem
    rejections = (parse_rejected_task_files(parameters).get(file, "") for parameters in metadata)
    return replace(task, replicas=loaded, waiting=len(metadata) - loaded, rejection=max(rejections, default=""))


def _parse_tasks(where: str, files: Files, declared: Collection[str]) -> dict[str, RegisteredTask]:
    """Tasks of the valid files by name; the others are logged."""
    tasks: dict[str, RegisteredTask] = {}
    named = sorted((*key, file) for file in files if (key := parse_file_name(file)) is not None)
    for index, name, file in named:
        if name in declared or name in tasks or len(tasks) == MAX_TASKS:
            log.warning("%s: file %s is skipped: the task exists, or %d others do", where, file, MAX_TASKS)
            continue
        try:
            tasks[name] = RegisteredTask(index, parse_task_record(files[file]))
        except UnusableTask as error:
            log.warning("%s: file %s is skipped: %s", where, file, error)
    return tasks
