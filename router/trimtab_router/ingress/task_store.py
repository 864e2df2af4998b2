"""Shell: the tasks that were registered while the router runs, in a folder that its replicas follow too.

A task is in force once its file lies there: replicas take it as they notice it, and those that start later find it. So
the death of all replicas, or of the router, loses none. What a replica refuses is taken away again. Where a task was
deleted a mark stays, so that no other task gets its number: requests that name it may still be on their way, and a
replica that notices late answers them as what they meant.
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
    MOST_TASKS,
    TaskRecord,
    UnusableTask,
    file_name,
    mark_name,
    number_and_name,
    parse_removed_marker,
    task_record,
)
from trimtab_protocol.extensions import tasks_of, tasks_refused_of
from trimtab_router.request.task_names import NO_INPUT, task_source
from trimtab_router.router import Router

log = logging.getLogger(__name__)

IN_FORCE_SECONDS = 5.0
"""How long replicas are waited for before a task is said to be accepted, or deleted, only."""
POLL_SECONDS = 0.02
_NAME = TypeAdapter[str](Name)


class TaskRefused(Exception):
    """A task that is not registered, or not deleted.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """A task that is registered.

    Attributes:
        number: what requests call it by in the input `task`.
        card: what its file tells.
        replicas: how many have it in force.
        waiting: how many do not yet.
    """

    number: int
    card: TaskRecord
    replicas: int = 0
    waiting: int = 0


class TaskStore:
    """Keeps the tasks of a folder: STAGE/VARIANT/NUMBER-NAME.safetensors.

    Args:
        router: told of every task.
        folder: where their files are.
    """

    def __init__(self, router: Router, folder: Path) -> None:
        self._router = router
        self._folder = folder
        self._registering = asyncio.Lock()
        self.tasks: dict[tuple[str, str], dict[str, RegisteredTask]] = {}
        """By stage and variant, then by name."""

    def read(self) -> None:
        """Know the tasks that were registered before this router started, and which of them were deleted."""
        for stage in self._router.pipeline.spec.stages:
            for variant in stage.variants:
                found = sorted((self._folder / stage.name / variant.name).glob("*"))
                for mark in filter(None, (parse_removed_marker(path.name) for path in found)):
                    self._router.unregister_task(stage.name, variant.name, mark[1])
                for path in found:
                    self._read(stage.name, variant.name, path)

    def _read(self, stage: str, variant: str, path: Path) -> None:
        named = number_and_name(path.name)
        try:
            if named is not None:
                self._know(stage, variant, named[1], RegisteredTask(named[0], task_record(path.read_bytes())))
        except (OSError, UnusableTask) as error:
            log.warning("%s is no task: %s", path, error)

    async def register(self, stage: str, variant: str, name: str, content: bytes) -> RegisteredTask:
        """Put a task in force on all replicas, for good.

        Raises:
            TaskRefused: 400 where the file or the name cannot be, 404 where there is no such variant, 409 where the
                task is known, 503 where no replica is ready to judge it.
        """
        async with self._registering:
            card = self._checked(stage, variant, name, content)
            facts = await self._router.model_metadata(stage, variant)
            number = self._number(stage, name, await self._numbers(self._router.pipeline.spec.stage(stage)))
            known = self.tasks.get((stage, variant), {})
            if name in known or any(name in tasks_of(told) for told in facts.values()):
                raise TaskRefused(409, f"variant {variant} of stage {stage} has a task {name!r} already")
            if len(known) == MOST_TASKS:
                raise TaskRefused(409, f"there may be {MOST_TASKS} tasks; this one would be more")
            if not facts:
                raise TaskRefused(503, f"no replica is ready for variant {variant} of stage {stage}; try again")
            path = self._folder / stage / variant / file_name(number, name)
            await asyncio.to_thread(write_atomically, path, content)
            in_force, waiting = await self._until_in_force(stage, variant, name, path)
            registered = RegisteredTask(number, card, in_force, waiting)
            self._know(stage, variant, name, registered)
            return registered

    async def delete(self, stage: str, variant: str, name: str) -> RegisteredTask:
        """Take a task out of force on all replicas, for good; its number is not given away again.

        Returns:
            It, with how many replicas have it no longer, and how many still do.

        Raises:
            TaskRefused: 404 where no such task was registered.
        """
        async with self._registering:
            task = self.tasks.get((stage, variant), {}).get(name)
            if task is None:
                raise TaskRefused(404, f"variant {variant} of stage {stage}: no task {name!r} was registered")
            folder = self._folder / stage / variant
            await asyncio.to_thread(write_atomically, folder / mark_name(task.number, name), b"")
            await asyncio.to_thread((folder / file_name(task.number, name)).unlink, missing_ok=True)
            del self.tasks[stage, variant][name]
            self._router.unregister_task(stage, variant, name)
            without, still = await self._until(stage, variant, lambda told: name not in tasks_of(told))
            return replace(task, replicas=without, waiting=still)

    def _know(self, stage: str, variant: str, name: str, task: RegisteredTask) -> None:
        self.tasks.setdefault((stage, variant), {})[name] = task
        self._router.register_task(stage, variant, name, task.card)

    def _checked(self, stage: str, variant: str, name: str, content: bytes) -> TaskRecord:
        try:
            owner = self._router.pipeline.spec.stage(stage)
            points = {one.name for one in owner.variant(variant).points}
        except KeyError as error:
            raise TaskRefused(404, str(error.args[0])) from error
        if task_source(owner) is None:
            raise TaskRefused(400, f"task {name!r}: {NO_INPUT.format(stage=stage)}")
        try:
            _NAME.validate_python(name)
            card = task_record(content)
        except ValidationError as error:
            raise TaskRefused(400, f"task {name!r}: a name has lower-case letters, digits and dashes") from error
        except UnusableTask as error:
            raise TaskRefused(400, f"task {name!r}: {error}") from error
        unknown = sorted(card.accuracy_by_point.keys() - points)
        if unknown:
            raise TaskRefused(
                400, f"task {name!r}: judged at {unknown[0]!r}, but points are {', '.join(sorted(points))}"
            )
        return card

    async def _numbers(self, stage: Stage) -> int:
        """The least number from which on none is anybody's, in any variant of a stage."""
        found = [await self._router.model_metadata(stage.name, variant.name) for variant in stage.variants]
        told = (len(tasks_of(each)) for facts in found for each in facts.values())
        kept = (t.number + 1 for (own, _), tasks in self.tasks.items() if own == stage.name for t in tasks.values())
        gone = await asyncio.to_thread(self._gone, stage.name)
        return max([*told, *kept, *gone], default=0)

    def _gone(self, stage: str) -> list[int]:
        """The numbers that come after those of tasks which were deleted."""
        marks = (parse_removed_marker(path.name) for path in (self._folder / stage).glob("*/*"))
        return [mark[0] + 1 for mark in marks if mark is not None]

    def _number(self, stage: str, name: str, free: int) -> int:
        """The number that a task has in another variant of its stage, else the next one."""
        found = (tasks[name].number for (own, _), tasks in self.tasks.items() if own == stage and name in tasks)
        return next(found, free)

    async def _until_in_force(self, stage: str, variant: str, name: str, path: Path) -> tuple[int, int]:
        """Wait until every replica has a task; returns how many do, and how many do not yet.

        Raises:
            TaskRefused: a replica refuses it; its file is gone.
        """
        refused = ""

        def has(told: Mapping[str, Any]) -> bool:
            nonlocal refused
            refused = refused or tasks_refused_of(told).get(path.stem, "")
            return bool(refused) or name in tasks_of(told)

        found = await self._until(stage, variant, has)
        if refused:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise TaskRefused(400, f"task {name!r}: {refused}")
        return found

    async def _until(self, stage: str, variant: str, so: Callable[[Mapping[str, Any]], bool]) -> tuple[int, int]:
        """Wait until what every replica tells is so; returns of how many it is, and of how many not yet."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + IN_FORCE_SECONDS
        while True:
            facts = await self._router.model_metadata(stage, variant)
            have = sum([so(told) for told in facts.values()])
            if have == len(facts) > 0 or loop.time() > give_up:
                return have, len(facts) - have
            await asyncio.sleep(POLL_SECONDS)
