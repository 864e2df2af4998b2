"""Task names of requests, resolved to the task indices of a stage's model.

Models identify tasks by index, in the input `task`. Requests may give a name instead. Replicas report the index of each
task. Replicas of a new generation may use other indices, so the name is stored until a batch is dispatched.
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

NO_TASK_INPUT = (
    f"stage {{stage}} has no input {TASK_INPUT!r}, which selects the task; add it to the stage's inputs: "
    f"{{{{name: {TASK_INPUT}, from: request.inputs.{TASK_INPUT}}}}}"
)
_SOON_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StageTasks:
    """Tasks of a stage."""

    stage: Stage
    in_plan: bool
    """Whether the current plan knows the named task."""
    declared: bool
    """Whether the variant declares the task, or it was registered at run time."""
    names_by_replica: Sequence[Sequence[str]] | None
    """Task names by index, for each replica. None before any replica has reported its tasks."""

    def indices(self, task: str) -> set[int]:
        """Indices of a task at the replicas: several during a rollout."""
        return {names.index(task) for names in self.names_by_replica or () if task in names}

    def is_missing(self, task: str) -> bool:
        """Whether a replica does not have a task, and would serve its rows without one."""
        return any(task not in names for names in self.names_by_replica or ())


@dataclass(frozen=True, slots=True)
class ResolvedTask:
    """Inputs of a request with the indices of its task, and the stages whose models have the task."""

    inputs: Mapping[str, Array]
    stages: Collection[str] = ()


def resolve_task(
    task: str, tasks_by_stage: Sequence[StageTasks], spec: InferencePipelineSpec, inputs: Mapping[str, Array]
) -> ResolvedTask:
    """Select a named task at every stage whose model has it.

    Args:
        task: task name, not empty.
        tasks_by_stage: tasks of the stages that the request needs.
        spec: specification of the pipeline.
        inputs: inputs of the request, rows first.

    Raises:
        Refusal: the inputs name another task by index, or no index is known for the name.
    """
    filled, stages = dict(inputs), []
    for tasks in tasks_by_stage:
        indices = _indices(task, tasks)
        if not indices:
            continue
        stages.append(tasks.stage.name)
        source_input = _request_input(task, tasks.stage, indices)
        if source_input in inputs:
            _require_same(task, source_input, inputs[source_input], indices)
        elif source_input:
            filled[source_input] = _task_input(spec, source_input, inputs, min(indices))
    return ResolvedTask(filled, frozenset(stages))


def accepts_task_names(stage: Stage) -> bool:
    """Whether requests may name tasks of a stage, so that its replicas must report their indices."""
    points = (point for variant in stage.variants for point in variant.points)
    return (
        task_source(stage) is not None
        or any(variant.tasks for variant in stage.variants)
        or any(point.accuracy_by_task for point in points)
    )


def task_source(stage: Stage) -> str | None:
    """Source of a stage's task indices, None if its model takes none."""
    return next((source_input.source for source_input in stage.inputs if source_input.name == TASK_INPUT), None)


def task_inputs(spec: InferencePipelineSpec) -> set[str]:
    """Inputs of a request that hold task indices. A request that names a task may omit them."""
    sources = (split_reference(source) for stage in spec.stages if (source := task_source(stage)) is not None)
    return {name for owner, name in sources if owner == REQUEST}


def missing_task_inputs(pipeline: str, spec: InferencePipelineSpec, inputs: Mapping[str, Array]) -> Refusal | None:
    """Refusal of a request whose named task supplied no index for an absent input, else None."""
    absent = (
        indices_given.name
        for indices_given in spec.inputs
        if not indices_given.optional and indices_given.name not in inputs
    )
    return next((missing_input(pipeline, name) for name in absent), None)


def missing_input(pipeline: str, name: str) -> Refusal:
    return invalid(f"input {name!r} is missing; {pipeline} needs it")


def task_indices_at(task: str, names_by_replica: Sequence[str], indices_given: Array) -> Array:
    """Task indices of rows at one replica.

    If the replica assigns the given indices to other tasks, they are replaced by the index of no task, so that no other
    task serves them. Indices beyond its list stay: the list may be older than the task, and an index is never reused.
    """
    if task in names_by_replica:
        return np.full_like(indices_given, names_by_replica.index(task))
    return np.where(indices_given < len(names_by_replica), indices_given.dtype.type(NO_TASK), indices_given)


def _indices(task: str, tasks: StageTasks) -> set[int]:
    """Indices that a name may have at a stage. Empty if its model has no such task.

    A model with one task has no choice: names are then kinds of samples with accuracies of their own.
    """
    prefix, names_by_replica = f"stage {tasks.stage.name}", tasks.names_by_replica
    if names_by_replica is None and tasks.in_plan and task_source(tasks.stage) is not None:
        message = f"{prefix}: no replica has reported the index of task {task!r} yet"
        raise Refusal(ErrorCode.UNAVAILABLE, "NoReplica", message, retry_after_seconds=_SOON_SECONDS)
    indices = tasks.indices(task)
    if (not indices and tasks.declared) or (indices and tasks.is_missing(task)):
        message = f"{prefix}: {'not every' if indices else 'no'} replica has task {task!r} yet"
        raise Refusal(ErrorCode.UNAVAILABLE, "NoReplica", message, retry_after_seconds=_SOON_SECONDS)
    multi_task = [names for names in names_by_replica or () if len(names) > 1]
    if not indices and multi_task and tasks.in_plan:
        raise invalid(f"{prefix}: no replica has a task {task!r}; there are: {', '.join(filter(None, multi_task[0]))}")
    return indices


def _request_input(task: str, stage: Stage, indices: Collection[int]) -> str:
    """Request input that selects a stage's task. Empty if its only task is the named one."""
    source = task_source(stage)
    if source is None:
        if set(indices) != {0}:
            raise invalid(f"parameter {TASK!r} names {task!r}, but {NO_TASK_INPUT.format(stage=stage.name)}")
        return ""
    owner, name = split_reference(source)
    if owner != REQUEST:
        raise invalid(
            f"parameter {TASK!r} names {task!r}, but the task of stage {stage.name} is an output of stage {owner}; "
            "leave the parameter out"
        )
    return name


def _require_same(task: str, name: str, indices_given: Array, indices: Collection[int]) -> None:
    mismatched = indices_given[~np.isin(indices_given, list(indices))]
    if mismatched.size:
        expected = " or ".join(map(str, sorted(indices)))
        raise invalid(
            f"parameter {TASK!r} names {task!r}, which has index {expected}, but input {name!r} has "
            f"{mismatched.ravel()[0]}; leave one of the two out"
        )


def _task_input(spec: InferencePipelineSpec, name: str, inputs: Mapping[str, Array], index: int) -> Array:
    declared = next(indices_given for indices_given in spec.inputs if indices_given.name == name)
    rows = len(next(iter(inputs.values())))
    shape = (rows, *(max(size, 1) for size in declared.shape))
    return np.full(shape, index, DTYPES[declared.datatype])
