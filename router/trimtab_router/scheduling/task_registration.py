"""Tasks that join a stage's variants: what was measured of them reaches whoever counts on it. Pure.

Some are registered while the router runs, and it reads their cards itself. Those that the pipeline names are files that
replicas load: these tell what the cards say. Where the pipeline tells of a task how accurate a point is on it, that
counts, and not the card.
"""

from collections.abc import Mapping

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyBasis
from trimtab_router.scheduling.stage_scheduler import StageScheduler


def register_task(
    desk: StageScheduler, variant: str, task: str, judged: Mapping[str, Accuracy], basis: AccuracyBasis
) -> None:
    """Know a task that joined a variant.

    Args:
        desk: of the stage.
        variant: which.
        task: its name.
        judged: how accurate operating points are on it, where that is known.
        basis: which figure of these counts.
    """
    points = desk.stage.variant(variant).points
    own = {
        point.name: judged[point.name]
        for point in points
        if point.name in judged and task not in point.accuracy_by_task
    }
    desk.outlook.enrol(variant, task, own, basis)
    desk.watch.enrol(variant, task, own)


def unregister_task(desk: StageScheduler, variant: str, task: str) -> None:
    """Forget a task that joined a variant."""
    desk.outlook.dismiss(variant, task)
    desk.watch.dismiss(variant, task)


def learn_declared_tasks(desk: StageScheduler, basis: AccuracyBasis) -> None:
    """Know the tasks that the pipeline names by the cards that replicas tell of."""
    for variant in desk.stage.variants:
        named = {task.name for task in variant.present_tasks}
        for slot in desk.slots:
            for task, judged in slot.judged.get(variant.name, {}).items():
                if task in named:
                    register_task(desk, variant.name, task, judged, basis)
