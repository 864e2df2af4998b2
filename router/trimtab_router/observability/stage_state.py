"""States of the stages for the router's state endpoint."""

from collections.abc import Mapping

from trimtab_pipelines.router_state import EndpointState, RegisteredAccuracy, StageState
from trimtab_router.observability.request_accounting import RequestAccounting
from trimtab_router.scheduling.replica_slots import ReplicaSlots
from trimtab_router.scheduling.stage_scheduler import StageScheduler


def stage_states(
    schedulers: Mapping[str, StageScheduler],
    unauthenticated: Mapping[str, Mapping[str, str]],
    accounting: RequestAccounting,
    now: float,
) -> dict[str, StageState]:
    """Current state and learned figures by stage. `unauthenticated` says by stage why replicas get no requests."""
    rows_per_request, tokens = accounting.rows_per_request.expected(now), accounting.prompt_tokens.expected(now)
    return {
        name: _stage_state(scheduler, rows_per_request.get(name), tokens.get(name), unauthenticated.get(name, {}), now)
        for name, scheduler in schedulers.items()
    }


def _stage_state(
    scheduler: StageScheduler,
    rows_per_request: float | None,
    prompt_tokens: float | None,
    unauthenticated: Mapping[str, str],
    now: float,
) -> StageState:
    drifted: dict[str, float] = {}
    by_task: dict[str, dict[str, float]] = {}
    for (variant, point, task), accuracy in scheduler.accuracy_monitor.drifted_accuracies(now).items():
        if variant == scheduler.variant and task:
            by_task.setdefault(point, {})[task] = accuracy
        elif variant == scheduler.variant:
            drifted[point] = accuracy
    return StageState(
        variant=scheduler.variant,
        batch_size=scheduler.plan.batch_size,
        operating_point=scheduler.plan.operating_point,
        ready_replicas=scheduler.ready_replicas,
        queue_rows=scheduler.queue.rows,
        service_ratio=scheduler.latency_model.service_ratio,
        rows_per_request=rows_per_request,
        prompt_tokens=prompt_tokens,
        drifted_accuracies=drifted,
        drifted_by_task=by_task,
        registered_accuracies={
            variant: {
                point: {task: RegisteredAccuracy.of(accuracy) for task, accuracy in by_task.items()}
                for point, by_task in by_point.items()
            }
            for variant, by_point in scheduler.latency_model.registered_accuracies().items()
        },
        endpoints={
            slot.name: EndpointState(
                ready=bool(slot.ready_variants),
                inflight_batches=slot.inflight,
                rejection=unauthenticated.get(slot.name) or _ejection(slot),
            )
            for slot in scheduler.replicas
        },
    )


def _ejection(replica: ReplicaSlots) -> str:
    return f"ejected as an outlier: {replica.ejection}" if replica.ejection else ""
