"""The tasks of what a stage runs, as its replicas tell them. Pure."""

from collections.abc import Sequence

from trimtab_router.request.task_names import StageTasks
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.replica_slots import ReplicaSlots


def stage_tasks(latency_model: LatencyModel, replicas: Sequence[ReplicaSlots], task: str) -> StageTasks:
    """What the ready replicas of a stage tell of a task, or who told last where none is ready.

    Nobody has a task that was deleted, whatever a replica that notices late tells; containers of the user's are not
    asked.
    """
    stage, variant = latency_model.stage, latency_model.variant
    if latency_model.is_unregistered(task) or stage.variant(variant).container is not None:
        return StageTasks(stage, task in latency_model.tasks(), False, ())
    told = [replica for replica in replicas if variant in replica.tasks]
    ready = [replica for replica in told if variant in replica.ready_variants]
    known, own = task in latency_model.tasks(), task in latency_model.own_tasks()
    return StageTasks(stage, known, own, [replica.tasks[variant] for replica in ready or told] or None)
