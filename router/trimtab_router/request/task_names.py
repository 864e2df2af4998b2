"""Which task of a stage's model a request's rows are of, where the request names it: the name becomes a number. Pure.

Models are told tasks by number, in the input `task`; requests may name one instead. Replicas tell which number each
task has: those of a new generation may count otherwise than those before, so that a name is kept until a batch leaves.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tasks import NO_TASK, TASK_INPUT
from trimtab_protocol import DTYPES
from trimtab_protocol.extensions import TASK
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal, invalid

NO_INPUT = (
    f"stage {{stage}} reads no input {TASK_INPUT!r}, by which its model would be told of this task; add it to the "
    f"stage's inputs: {{{{name: {TASK_INPUT}, from: request.inputs.{TASK_INPUT}}}}}"
)
_SOON_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StageTasks:
    """The tasks of what a stage runs.

    Attributes:
        stage: the stage.
        known: whether the plan in force knows the task that is named.
        own: whether it is a task that the variant declares, or that joined it.
        listed: what each replica tells, names by number; None where none has told anything yet.
    """

    stage: Stage
    known: bool
    own: bool
    listed: Sequence[Sequence[str]] | None

    def numbers(self, task: str) -> set[int]:
        """The numbers that replicas have for a task: several while a new generation takes over from another."""
        return {names.index(task) for names in self.listed or () if task in names}

    def lacks(self, task: str) -> bool:
        """Whether a replica does not have a task: a batch that goes there would be answered as of none."""
        return any(task not in names for names in self.listed or ())


@dataclass(frozen=True, slots=True)
class ResolvedTask:
    """A request's inputs with the task that it names, and the stages whose models have that task."""

    inputs: Mapping[str, Array]
    stages: Collection[str] = ()


def resolve_task(
    task: str, rosters: Sequence[StageTasks], spec: InferencePipelineSpec, inputs: Mapping[str, Array]
) -> ResolvedTask:
    """Let a name choose the task of every stage whose model has it; others are left as they are.

    Args:
        task: the name, not empty.
        rosters: of the stages that the request needs.
        spec: the pipeline's.
        inputs: of the request, rows first.

    Raises:
        Refusal: the request says by number that its rows are of another task, or no number can say which they are of.
    """
    filled, stages = dict(inputs), []
    for roster in rosters:
        numbers = _numbers(task, roster)
        if not numbers:
            continue
        stages.append(roster.stage.name)
        read = _request_input(task, roster.stage, numbers)
        if read in inputs:
            _require_same(task, read, inputs[read], numbers)
        elif read:
            filled[read] = _filled(spec, read, inputs, min(numbers))
    return ResolvedTask(filled, frozenset(stages))


def accepts_task_names(stage: Stage) -> bool:
    """Whether requests may name tasks of a stage, so that its replicas are asked for their numbers."""
    points = (point for variant in stage.variants for point in variant.points)
    return (
        task_source(stage) is not None
        or any(variant.tasks for variant in stage.variants)
        or any(point.accuracy_by_task for point in points)
    )


def task_source(stage: Stage) -> str | None:
    """Where a stage takes the numbers of its rows' tasks from; None where its model is told of none."""
    return next((read.source for read in stage.inputs if read.name == TASK_INPUT), None)


def task_inputs(spec: InferencePipelineSpec) -> set[str]:
    """The inputs of a request that tell stages the numbers of tasks: who names a task may leave them out."""
    sources = (split_reference(source) for stage in spec.stages if (source := task_source(stage)) is not None)
    return {name for owner, name in sources if owner == REQUEST}


def missing_task_inputs(pipeline: str, spec: InferencePipelineSpec, inputs: Mapping[str, Array]) -> Refusal | None:
    """Why a request cannot be served whose name of a task gave no number for an input that it lacks; else None."""
    absent = (given.name for given in spec.inputs if not given.optional and given.name not in inputs)
    return next((missing_input(pipeline, name) for name in absent), None)


def missing_input(pipeline: str, name: str) -> Refusal:
    """A request that lacks an input."""
    return invalid(f"input {name!r} is missing; {pipeline} needs it")


def task_indices_at(task: str, listed: Sequence[str], given: Array) -> Array:
    """The numbers of rows of a task at one replica.

    Where that lists other tasks by the numbers given, they become that of no task, so that nobody else answers. What
    is beyond its list stays: the list may be older than the task, and a number is given away once.
    """
    if task in listed:
        return np.full_like(given, listed.index(task))
    return np.where(given < len(listed), given.dtype.type(NO_TASK), given)


def _numbers(task: str, roster: StageTasks) -> set[int]:
    """The numbers that a name may stand for at a stage; none where it is no name of its model's tasks.

    A model with one task has no other to choose: names are of kinds of samples then, with accuracies of their own.
    """
    where, listed = f"stage {roster.stage.name}", roster.listed
    if listed is None and roster.known and task_source(roster.stage) is not None:
        message = f"{where}: no replica has told yet which number task {task!r} has"
        raise Refusal(ErrorCode.UNAVAILABLE, "NoReplica", message, retry_after_seconds=_SOON_SECONDS)
    numbers = roster.numbers(task)
    if (not numbers and roster.own) or (numbers and roster.lacks(task)):
        message = f"{where}: {'not every' if numbers else 'no'} replica has task {task!r} yet"
        raise Refusal(ErrorCode.UNAVAILABLE, "NoReplica", message, retry_after_seconds=_SOON_SECONDS)
    several = [names for names in listed or () if len(names) > 1]
    if not numbers and several and roster.known:
        raise invalid(f"{where}: no replica has a task {task!r}; there are: {', '.join(filter(None, several[0]))}")
    return numbers


def _request_input(task: str, stage: Stage, numbers: Collection[int]) -> str:
    """The input of the request that tells a stage its tasks; empty where its model answers this one untold."""
    source = task_source(stage)
    if source is None:
        if set(numbers) != {0}:
            raise invalid(f"parameter {TASK!r} names {task!r}, but {NO_INPUT.format(stage=stage.name)}")
        return ""
    owner, name = split_reference(source)
    if owner != REQUEST:
        raise invalid(
            f"parameter {TASK!r} names {task!r}, but stage {owner} says of which tasks rows are; leave it out"
        )
    return name


def _require_same(task: str, name: str, given: Array, numbers: Collection[int]) -> None:
    others = given[~np.isin(given, list(numbers))]
    if others.size:
        right = " or ".join(map(str, sorted(numbers)))
        raise invalid(
            f"parameter {TASK!r} names {task!r}, which is number {right}, but input {name!r} says "
            f"{others.ravel()[0]}; leave one of the two out"
        )


def _filled(spec: InferencePipelineSpec, name: str, inputs: Mapping[str, Array], number: int) -> Array:
    declared = next(given for given in spec.inputs if given.name == name)
    rows = len(next(iter(inputs.values())))
    shape = (rows, *(max(size, 1) for size in declared.shape))
    return np.full(shape, number, DTYPES[declared.datatype])
