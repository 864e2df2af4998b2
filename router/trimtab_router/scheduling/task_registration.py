"""Tasks that join a stage's variants: what was measured of them reaches whoever counts on it. Pure.

Some are registered while the router runs, and it reads their cards itself. Those that the pipeline names are files that
replicas load: these tell what the cards say. Where the pipeline tells of a task how accurate a point is on it, that
counts, and not the card.
"""

from collections.abc import Mapping

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyBasis
from trimtab_router.scheduling.stage_scheduler import StageScheduler


def register_task(
    scheduler: StageScheduler, variant: str, task: str, judged: Mapping[str, Accuracy], basis: AccuracyBasis
) -> None:
    """Know a task that joined a variant.

    Args:
        desk: of the stage.
        variant: which.
        task: its name.
        judged: how accurate operating points are on it, where that is known.
        basis: which figure of these counts.
    """
    points = scheduler.stage.variant(variant).points
    own = {
        point.name: judged[point.name]
        for point in points
        if point.name in judged and task not in point.accuracy_by_task
    }
    scheduler.latency_model.register_task(variant, task, own, basis)
    scheduler.accuracy_monitor.register_task(variant, task, own)


def unregister_task(scheduler: StageScheduler, variant: str, task: str) -> None:
    """Forget a task that joined a variant."""
    scheduler.latency_model.unregister_task(variant, task)
    scheduler.accuracy_monitor.unregister_task(variant, task)


def learn_declared_tasks(scheduler: StageScheduler, basis: AccuracyBasis) -> None:
    """Know the tasks that the pipeline names by the cards that replicas tell of."""
    for variant in scheduler.stage.variants:
        named = {task.name for task in variant.loaded_tasks}
        for replica in scheduler.replicas:
            for task, judged in replica.task_accuracies.get(variant.name, {}).items():
                if task in named:
                    register_task(scheduler, variant.name, task, judged, basis)
