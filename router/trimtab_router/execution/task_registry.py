"""`TaskRegistry`: tasks of a pipeline, declared or registered at run time, and their indices at the stages' models.

Models identify tasks by index, in the input `task`. Requests may give a name instead. Replicas report the index of each
task. Replicas of a new generation may use other indices, so the name is stored until a batch is dispatched.

The router reads the records of tasks that are registered at run time. Declared tasks are files that replicas load, and
the replicas report their records. An accuracy in the pipeline takes precedence over the one in a record.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tasks import NO_TASK, TASK_INPUT, TaskRecord, TaskTerms
from trimtab_protocol import DTYPES
from trimtab_protocol.extensions import TASK
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.scheduling.stage_scheduler import StageScheduler

NO_TASK_INPUT = (
    f"stage {{stage}} has no input {TASK_INPUT!r}, which selects the task; add it to the stage's inputs: "
    f"{{{{name: {TASK_INPUT}, from: request.inputs.{TASK_INPUT}}}}}"
)


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


class TaskRegistry:
    """Tasks of a pipeline. `has_indices`: whether replicas report the indices of tasks."""

    def __init__(
        self, spec: InferencePipelineSpec, schedulers: Mapping[str, StageScheduler], *, has_indices: bool
    ) -> None:
        self._spec = spec
        self._schedulers = schedulers
        self._has_indices = has_indices
        self._terms: dict[str, TaskTerms] = {
            task.name: task for stage in spec.stages for variant in stage.variants for task in variant.loaded_tasks
        }

    def terms(self, task: str) -> TaskTerms | None:
        return self._terms.get(task)

    def names(self) -> list[str]:
        return sorted({task for scheduler in self._schedulers.values() for task in scheduler.latency_model.tasks()})

    def register(self, stage: str, variant: str, task: str, record: TaskRecord) -> None:
        """Register a task of a variant at run time. Its terms apply unless the name has terms already."""
        self._register(self._schedulers[stage], variant, task, record.accuracy_by_point)
        self._terms.setdefault(task, record)

    def unregister(self, stage: str, variant: str, task: str) -> None:
        """Unregister a task of a variant, and its terms unless another variant has the task."""
        scheduler = self._schedulers[stage]
        scheduler.latency_model.unregister_task(variant, task)
        scheduler.accuracy_monitor.unregister_task(variant, task)
        if not any(scheduler.latency_model.has_task(task) for scheduler in self._schedulers.values()):
            self._terms.pop(task, None)

    def learn_declared(self, scheduler: StageScheduler) -> None:
        """Register a stage's declared tasks with the accuracies that its replicas report."""
        for variant in scheduler.stage.variants:
            declared = {task.name for task in variant.loaded_tasks}
            for replica in scheduler.replicas:
                for task, accuracies in replica.task_accuracies.get(variant.name, {}).items():
                    if task in declared:
                        self._register(scheduler, variant.name, task, accuracies)

    def _register(self, scheduler: StageScheduler, variant: str, task: str, accuracies: Mapping[str, Accuracy]) -> None:
        undeclared = {
            point.name: accuracies[point.name]
            for point in scheduler.stage.variant(variant).points
            if point.name in accuracies and task not in point.accuracy_by_task
        }
        basis = self._spec.objective.accuracy_basis
        scheduler.latency_model.register_task(variant, task, undeclared, basis)
        scheduler.accuracy_monitor.register_task(variant, task, undeclared)

    def resolve(
        self, task: str, stages: Iterable[str], inputs: Mapping[str, Array]
    ) -> tuple[Mapping[str, Array], Collection[str]]:
        """Inputs of a request with the indices of its task, and the stages whose models have it.

        Raises Refusal if the inputs name another task by index, or no index is known for the name.
        """
        if not task or not self._has_indices:
            return inputs, ()
        return resolve_task(task, [stage_tasks(self._schedulers[stage], task) for stage in stages], self._spec, inputs)


def stage_tasks(scheduler: StageScheduler, task: str) -> StageTasks:
    """What the ready replicas of a stage report about a task; without one, the last reports.

    A deleted task is not served, even if a replica still reports it. Containers of other servers report none.
    """
    model = scheduler.latency_model
    stage, variant = model.stage, model.variant
    if model.is_unregistered(task) or stage.variant(variant).container is not None:
        return StageTasks(stage, task in model.tasks(), False, ())
    reporting = [replica for replica in scheduler.replicas if variant in replica.tasks]
    ready = [replica for replica in reporting if variant in replica.ready_variants]
    tasks = [replica.tasks[variant] for replica in ready or reporting]
    return StageTasks(stage, task in model.tasks(), task in model.own_tasks(), tasks or None)


def resolve_task(
    task: str, tasks_by_stage: Sequence[StageTasks], spec: InferencePipelineSpec, inputs: Mapping[str, Array]
) -> tuple[Mapping[str, Array], Collection[str]]:
    """Select a named task at every stage whose model has it, as `TaskRegistry.resolve`."""
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
    return filled, frozenset(stages)


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


def require_inputs(pipeline: str, spec: InferencePipelineSpec, inputs: Mapping[str, Array]) -> None:
    """Raise Refusal if a required input is absent: its named task supplied no index for it."""
    for declared in spec.inputs:
        if not declared.optional and declared.name not in inputs:
            raise missing_input(pipeline, declared.name)


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
        raise Refusal("NoReplica", message)
    indices = tasks.indices(task)
    if (not indices and tasks.declared) or (indices and tasks.is_missing(task)):
        message = f"{prefix}: {'not every' if indices else 'no'} replica has task {task!r} yet"
        raise Refusal("NoReplica", message)
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
    declared = next(tensor for tensor in spec.inputs if tensor.name == name)
    rows = len(next(iter(inputs.values())))
    shape = (rows, *(max(size, 1) for size in declared.shape))
    return np.full(shape, index, DTYPES[declared.datatype])
