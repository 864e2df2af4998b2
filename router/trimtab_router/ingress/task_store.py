"""`TaskStore`: tasks registered at run time, in a folder that the replicas watch.

A task is registered once its file is in the folder: replicas load it when they notice it, and later replicas find it. A
failure of all replicas, or of the router, loses no task. A task that a replica rejects is removed. A deleted task
leaves a marker, so that its index is not reused: requests that name it may still be in flight, and a replica that
notices the deletion late still serves them as that task.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.resource import Name
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tasks import (
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


class TaskStore:
    """Tasks of a folder: STAGE/VARIANT/INDEX-NAME.safetensors."""

    def __init__(self, router: Router, folder: Path) -> None:
        self._router = router
        self._folder = folder
        self._registering = asyncio.Lock()
        self.tasks: dict[tuple[str, str], dict[str, RegisteredTask]] = {}
        """By (stage, variant), then by name."""

    def read(self) -> None:
        """Load the tasks registered or deleted before this router started."""
        for stage in self._router.pipeline.spec.stages:
            for variant in stage.variants:
                paths = sorted((self._folder / stage.name / variant.name).glob("*"))
                for marker in filter(None, (parse_removed_marker(path.name) for path in paths)):
                    self._router.tasks.unregister(stage.name, variant.name, marker[1])
                for path in paths:
                    self._read(stage.name, variant.name, path)

    def _read(self, stage: str, variant: str, path: Path) -> None:
        named = parse_file_name(path.name)
        try:
            if named is not None:
                self._add(stage, variant, named[1], RegisteredTask(named[0], parse_task_record(path.read_bytes())))
        except (OSError, UnusableTask) as error:
            log.warning("%s is not a task file: %s", path, error)

    async def register(self, stage: str, variant: str, name: str, content: bytes) -> RegisteredTask:
        """Register a task on all replicas, permanently.

        Raises:
            TaskRefused: 400 for an invalid file or name, 404 for an unknown variant, 409 for an existing task, 503 if
                no replica is ready to check it.
        """
        async with self._registering:
            record = self._validate(stage, variant, name, content)
            metadata = await self._router.model_metadata(stage, variant)
            number = self._choose_index(stage, name, await self._free_index(self._router.pipeline.spec.stage(stage)))
            registered_tasks = self.tasks.get((stage, variant), {})
            if name in registered_tasks or any(name in parse_tasks(parameters) for parameters in metadata.values()):
                raise TaskRefused(409, f"variant {variant} of stage {stage} has a task {name!r} already")
            if len(registered_tasks) == MAX_TASKS:
                raise TaskRefused(409, f"there are {MAX_TASKS} tasks, the maximum")
            if not metadata:
                raise TaskRefused(503, f"no replica is ready for variant {variant} of stage {stage}; try again")
            path = self._folder / stage / variant / file_name(number, name)
            await asyncio.to_thread(write_atomically, path, content)
            loaded, waiting = await self._wait_until_loaded(stage, variant, name, path)
            task = RegisteredTask(number, record, loaded, waiting)
            self._add(stage, variant, name, task)
            return task

    async def delete(self, stage: str, variant: str, name: str) -> RegisteredTask:
        """Delete a task on all replicas, permanently. Its index is not reused.

        Returns:
            The task, with the numbers of replicas that have and have not unloaded it.

        Raises:
            TaskRefused: 404 if the task is not registered.
        """
        async with self._registering:
            task = self.tasks.get((stage, variant), {}).get(name)
            if task is None:
                raise TaskRefused(404, f"variant {variant} of stage {stage}: no task {name!r} is registered")
            folder = self._folder / stage / variant
            await asyncio.to_thread(write_atomically, folder / removed_marker_name(task.index, name), b"")
            await asyncio.to_thread((folder / file_name(task.index, name)).unlink, missing_ok=True)
            del self.tasks[stage, variant][name]
            self._router.tasks.unregister(stage, variant, name)
            unloaded, pending = await self._wait_for_replicas(
                stage, variant, lambda parameters: name not in parse_tasks(parameters)
            )
            return replace(task, replicas=unloaded, waiting=pending)

    def _add(self, stage: str, variant: str, name: str, task: RegisteredTask) -> None:
        self.tasks.setdefault((stage, variant), {})[name] = task
        self._router.tasks.register(stage, variant, name, task.record)

    def _validate(self, stage: str, variant: str, name: str, content: bytes) -> TaskRecord:
        try:
            owner = self._router.pipeline.spec.stage(stage)
            points = {point.name for point in owner.variant(variant).points}
        except KeyError as error:
            raise TaskRefused(404, str(error.args[0])) from error
        if task_source(owner) is None:
            raise TaskRefused(400, f"task {name!r}: {NO_TASK_INPUT.format(stage=stage)}")
        try:
            _TASK_NAME.validate_python(name)
            record = parse_task_record(content)
        except ValidationError as error:
            raise TaskRefused(400, f"task {name!r}: a name has lower-case letters, digits and dashes") from error
        except UnusableTask as error:
            raise TaskRefused(400, f"task {name!r}: {error}") from error
        unknown = sorted(record.accuracy_by_point.keys() - points)
        if unknown:
            raise TaskRefused(
                400,
                f"task {name!r}: unknown operating point {unknown[0]!r}; known: {', '.join(sorted(points))}",
            )
        return record

    async def _free_index(self, stage: Stage) -> int:
        """First index that no task of any variant of a stage has."""
        variants = [await self._router.model_metadata(stage.name, variant.name) for variant in stage.variants]
        loaded = (len(parse_tasks(replica)) for metadata in variants for replica in metadata.values())
        registered = (tasks for (owner, _), tasks in self.tasks.items() if owner == stage.name)
        stored = (task.index + 1 for tasks in registered for task in tasks.values())
        removed = await asyncio.to_thread(self._removed_indices, stage.name)
        return max([*loaded, *stored, *removed], default=0)

    def _removed_indices(self, stage: str) -> list[int]:
        """Indices that follow those of deleted tasks."""
        markers = (parse_removed_marker(path.name) for path in (self._folder / stage).glob("*/*"))
        return [marker[0] + 1 for marker in markers if marker is not None]

    def _choose_index(self, stage: str, name: str, free: int) -> int:
        """Index of the task in another variant of its stage, else the next free one."""
        indices = (tasks[name].index for (owner, _), tasks in self.tasks.items() if owner == stage and name in tasks)
        return next(indices, free)

    async def _wait_until_loaded(self, stage: str, variant: str, name: str, path: Path) -> tuple[int, int]:
        """Wait until every replica has a task. Returns the numbers of replicas that have and have not.

        Raises:
            TaskRefused: a replica rejected the task. Its file is removed.
        """
        rejection = ""

        def loaded_or_refused(parameters: Mapping[str, Any]) -> bool:
            nonlocal rejection
            rejection = rejection or parse_rejected_task_files(parameters).get(path.stem, "")
            return bool(rejection) or name in parse_tasks(parameters)

        counts = await self._wait_for_replicas(stage, variant, loaded_or_refused)
        if rejection:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise TaskRefused(400, f"task {name!r}: {rejection}")
        return counts

    async def _wait_for_replicas(
        self, stage: str, variant: str, condition: Callable[[Mapping[str, Any]], bool]
    ) -> tuple[int, int]:
        """Wait until the metadata of all replicas meets a condition. Returns how many do, and how many do not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOAD_SECONDS
        while True:
            metadata = await self._router.model_metadata(stage, variant)
            ready = sum([condition(parameters) for parameters in metadata.values()])
            if ready == len(metadata) > 0 or loop.time() > deadline:
                return ready, len(metadata) - ready
            await asyncio.sleep(POLL_SECONDS)
