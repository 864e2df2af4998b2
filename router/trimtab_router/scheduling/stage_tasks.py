"""The tasks of what a stage runs, as its replicas tell them. Pure."""

from collections.abc import Sequence

from trimtab_router.request.task_names import StageTasks
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.replica_slots import ReplicaSlots


def stage_tasks(outlook: LatencyModel, slots: Sequence[ReplicaSlots], task: str) -> StageTasks:
    """What the ready replicas of a stage tell of a task, or who told last where none is ready.

    Nobody has a task that was deleted, whatever a replica that notices late tells; containers of the user's are not
    asked.
    """
    stage, variant = outlook.stage, outlook.variant
    if outlook.dismissed(task) or stage.variant(variant).container is not None:
        return StageTasks(stage, task in outlook.tasks(), False, ())
    told = [slot for slot in slots if variant in slot.tasks]
    ready = [slot for slot in told if variant in slot.ready_variants]
    known, own = task in outlook.tasks(), task in outlook.own_tasks()
    return StageTasks(stage, known, own, [slot.tasks[variant] for slot in ready or told] or None)
