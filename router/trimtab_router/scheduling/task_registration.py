"""Task registration of a stage: tasks of its variants, declared by the pipeline or registered at run time.

The router reads the records of tasks that are registered at run time. Declared tasks are files that replicas load, and
the replicas report their records. An accuracy in the pipeline takes precedence over the one in a record.
"""

from collections.abc import Mapping

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyBasis
from trimtab_router.request.task_names import StageTasks
from trimtab_router.scheduling.stage_scheduler import StageScheduler


def register_task(
    scheduler: StageScheduler, variant: str, task: str, accuracies: Mapping[str, Accuracy], basis: AccuracyBasis
) -> None:
    """Register a task of a variant.

    Args:
        scheduler: of the stage.
        variant: the variant.
        task: its name.
        accuracies: accuracies of operating points for the task.
        basis: which of their values counts.
    """
    points = scheduler.stage.variant(variant).points
    undeclared = {
        point.name: accuracies[point.name]
        for point in points
        if point.name in accuracies and task not in point.accuracy_by_task
    }
    scheduler.latency_model.register_task(variant, task, undeclared, basis)
    scheduler.accuracy_monitor.register_task(variant, task, undeclared)


def unregister_task(scheduler: StageScheduler, variant: str, task: str) -> None:
    scheduler.latency_model.unregister_task(variant, task)
    scheduler.accuracy_monitor.unregister_task(variant, task)


def learn_declared_tasks(scheduler: StageScheduler, basis: AccuracyBasis) -> None:
    """Register the declared tasks with the accuracies that replicas report."""
    for variant in scheduler.stage.variants:
        declared = {task.name for task in variant.loaded_tasks}
        for replica in scheduler.replicas:
            for task, accuracies in replica.task_accuracies.get(variant.name, {}).items():
                if task in declared:
                    register_task(scheduler, variant.name, task, accuracies, basis)


def stage_tasks(scheduler: StageScheduler, task: str) -> StageTasks:
    """Return what the ready replicas of a stage report about a task; without one, the last reports.

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
