"""States of the stages for the router's state endpoint."""

from collections.abc import Mapping

from trimtab_pipelines.router_state import EndpointState, RegisteredAccuracy, ReportedRows, StageState, VariantState
from trimtab_router.observability.request_accounting import RequestAccounting
from trimtab_router.observability.row_counts import RowCounts
from trimtab_router.scheduling.stage_scheduler import StageScheduler


def stage_states(
    schedulers: Mapping[str, StageScheduler],
    unauthenticated: Mapping[str, Mapping[str, str]],
    accounting: RequestAccounting,
    row_counts: Mapping[str, RowCounts],
    now: float,
) -> dict[str, StageState]:
    """Current state and learned figures by stage. `unauthenticated` says by stage why replicas get no requests."""
    rows_per_request, tokens = accounting.rows_per_request.expected(now), accounting.prompt_tokens.expected(now)
    return {
        name: _stage_state(
            scheduler,
            rows_per_request.get(name),
            tokens.get(name),
            unauthenticated.get(name, {}),
            row_counts[name],
            now,
        )
        for name, scheduler in schedulers.items()
    }


def _stage_state(
    scheduler: StageScheduler,
    rows_per_request: float | None,
    prompt_tokens: float | None,
    unauthenticated: Mapping[str, str],
    row_counts: RowCounts,
    now: float,
) -> StageState:
    drifted = scheduler.accuracy_monitor.drifted_accuracies(now)
    ratios = scheduler.latency_model.other_service_ratios()
    outputs = scheduler.output_monitor.changed()
    others = sorted({*ratios, *(variant for variant, *_ in (*drifted, *outputs))} - {scheduler.variant})
    return StageState(
        **dict(_variant_state(drifted, outputs, scheduler.variant, scheduler.latency_model.service_ratio)),
        other_variants={name: _variant_state(drifted, outputs, name, ratios.get(name)) for name in others},
        variant=scheduler.variant,
        batch_size=scheduler.plan.batch_size,
        operating_point=scheduler.plan.operating_point,
        ready_replicas=scheduler.ready_replicas,
        queue_rows=scheduler.queue.rows,
        expected_shares=ReportedRows.list_of(scheduler.plan.expected_rows),
        recent_rows=row_counts.recent_rows(now),
        low_confidence=row_counts.recent_low_confidence(now),
        rows_per_request=rows_per_request,
        prompt_tokens=prompt_tokens,
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
                rejection=unauthenticated.get(slot.name)
                or (f"ejected as an outlier: {slot.ejection}" if slot.ejection else ""),
            )
            for slot in scheduler.replicas
        },
    )


def _variant_state(
    drifted: Mapping[tuple[str, str, str], float],
    outputs: Mapping[tuple[str, str], float],
    variant: str,
    service_ratio: float | None,
) -> VariantState:
    overall: dict[str, float] = {}
    by_task: dict[str, dict[str, float]] = {}
    for (owner, point, task), accuracy in drifted.items():
        if owner == variant and task:
            by_task.setdefault(point, {})[task] = accuracy
        elif owner == variant:
            overall[point] = accuracy
    return VariantState(
        service_ratio=service_ratio,
        drifted_outputs={point: distance for (owner, point), distance in outputs.items() if owner == variant},
        drifted_accuracies=overall,
        drifted_by_task=by_task,
    )
