"""How a stage stands, as its router tells it. Pure."""

from collections.abc import Mapping

from trimtab_pipelines.router_state import EndpointState, JoinedAccuracy, StageState
from trimtab_router.scheduling.stage_scheduler import StageScheduler


def stage_state(
    desk: StageScheduler,
    rows_per_request: float | None,
    prompt_tokens: float | None,
    refused: Mapping[str, str],
    now: float,
) -> StageState:
    """What a stage runs and has learnt.

    Args:
        desk: the stage's.
        rows_per_request: how many rows a request brings it; None before the first.
        prompt_tokens: how many the prompts have that came lately, on average; None where nobody knows.
        refused: why replicas get no work, by name.
        now: seconds of the desk's clock.
    """
    of_all: dict[str, float] = {}
    by_task: dict[str, dict[str, float]] = {}
    for (variant, point, task), accuracy in desk.watch.drifted(now).items():
        if variant == desk.variant and task:
            by_task.setdefault(point, {})[task] = accuracy
        elif variant == desk.variant:
            of_all[point] = accuracy
    return StageState(
        variant=desk.variant,
        batch_size=desk.plan.batch_size,
        operating_point=desk.plan.operating_point,
        ready_replicas=desk.ready_replicas,
        queue_rows=desk.queue.rows,
        service_ratio=desk.outlook.service_ratio,
        rows_per_request=rows_per_request,
        prompt_tokens=prompt_tokens,
        drifted_accuracies=of_all,
        drifted_by_task=by_task,
        joined_accuracies={
            variant: {
                point: {task: JoinedAccuracy.of(one) for task, one in by_task.items()}
                for point, by_task in by_point.items()
            }
            for variant, by_point in desk.outlook.joined().items()
        },
        endpoints={
            slot.name: EndpointState(
                ready=bool(slot.ready_variants), inflight_batches=slot.inflight, refused=refused.get(slot.name, "")
            )
            for slot in desk.slots
        },
    )
