"""Status of an InferencePipeline after a tick: the adapter's three conditions, amounts and history.

Amounts are rounded, and changed figures in messages do not count as changes, so that a quiet pipeline causes no writes.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trimtab_adapter.controller import Tick
from trimtab_adapter.planning.explain import describe_option
from trimtab_kubernetes.conditions import ConditionState, conditions, failing, ok
from trimtab_kubernetes.events import event
from trimtab_kubernetes.objects import Object, rfc3339
from trimtab_pipelines.kubernetes_names import ADAPTER_MANAGER
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.row_shares import describe_shares, have_several_points
from trimtab_pipelines.status import ADAPTER_CONDITIONS, Condition, Decision, InferencePipelineStatus, StageShares

OWN_FIELDS = {"conditions", "history", "rps", "forecast_rps", "cost_per_hour", "accuracy", "p99", "shares"}
"""Fields the adapter applies; the others stay the operator's."""
MAX_HISTORY = 20
MAX_CHANGE_LENGTH = 1024
_FIGURES = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_METRICS, _FORECAST, _PLAN = ADAPTER_CONDITIONS


def build_status(tick: Tick, before: Mapping[str, Any], observed_generation: int) -> dict[str, Any]:
    """The adapter's part of the status; transition times and history continue those of the status `before`."""
    earlier = before.get("conditions") or ()
    findings = filter(None, (_metrics(tick), _forecast(tick), _planned(tick)))
    found = conditions(findings, earlier, observed_generation, tick.now_seconds)
    kept = {one["type"]: one for one in (*earlier, *found) if one["type"] in ADAPTER_CONDITIONS}
    status = InferencePipelineStatus(
        conditions=tuple(map(Condition.model_validate, kept.values())),
        history=_history(tick, before.get("history") or ()),
        shares=_shares(tick),
        **_amounts(tick, before),
    )
    return status.model_dump(mode="json", by_alias=True, exclude_none=True, include=OWN_FIELDS)


def significant_fields(status: Mapping[str, Any]) -> tuple[Any, ...]:
    """The parts of a status whose change is worth a write."""
    conditions = [
        (c["type"], c["status"], c["reason"], _FIGURES.sub("#", c.get("message", "")), c.get("observedGeneration"))
        for c in status.get("conditions", ())
    ]
    amounts = [status.get(name) for name in ("rps", "forecastRps", "costPerHour", "accuracy", "p99")]
    shares = _FIGURES.sub("#", str(status.get("shares")))
    return conditions, amounts, shares, status.get("history")


def _metrics(tick: Tick) -> ConditionState | None:
    if tick.fault is not None:
        remedy = {
            "Missing": "check that the routers are ready, and that Prometheus scrapes them if it is used",
            "Stale": "check that Prometheus still scrapes the routers",
            "Absurd": "check which server responds at that address, and the clocks",
        }[tick.fault]
        return failing(_METRICS, tick.fault, f"{tick.problem}; the plan is held. To fix it, {remedy}")
    if tick.load is None:
        return None
    if not any(rps > 0 for rps in tick.load.history_rps):
        return ok(_METRICS, "NoTraffic", "no request arrived in the last ten minutes; the plan is for the minimum load")
    known = "the load of the last seconds is known"
    if tick.load.missing:
        part = f"only part of the load is known ({tick.load.missing})"
        known = f"{part}; the plan is not reduced until all of it is known"
    return ok(_METRICS, "Fresh", known)


def _forecast(tick: Tick) -> ConditionState | None:
    forecast = tick.forecast
    if forecast is None:
        return None
    forecaster = tick.pipeline.spec.adaptation.forecaster
    match forecast.source:
        case "lstm":
            return ok(_FORECAST, "LSTM", f"forecast by the LSTM: {forecast.reason}")
        case "oracle":
            return ok(_FORECAST, "Oracle", "the future load is known")
    if forecast.reason.startswith("the forecaster failed") or "is invalid" in forecast.reason:
        return failing(_FORECAST, "Failed", f"{forecast.reason}; the last maximum is used. See the adapter's log")
    if forecaster == "LSTM" and "LSTM needs" in forecast.reason:
        message = f"the last maximum is used until there is enough history: {forecast.reason}"
        return ok(_FORECAST, "TooLittleHistory", message)
    return ok(_FORECAST, "Reactive", forecast.reason or "the last maximum is used")


def _planned(tick: Tick) -> ConditionState | None:
    if tick.pipeline.spec.mode == "Paused":
        return ok(_PLAN, "Paused", "spec.mode is Paused: the plan in force stays; set it to Auto to resume planning")
    if tick.decided == "held" and tick.fault is not None:
        return failing(_PLAN, "HeldLast", f"the plan in force is held: {tick.problem}")
    if tick.decided == "held" or tick.config_problem:
        problem = tick.problem or tick.config_problem
        return failing(_PLAN, "PlanningError", f"{problem}; the plan in force, if any, stays")
    return None if tick.plan is None else _quality(tick, tick.plan)


def _quality(tick: Tick, plan: PipelinePlan) -> ConditionState:
    if tick.pipeline.spec.mode == "Advisory":
        return ok(_PLAN, "Advisory", "spec.mode is Advisory: plans are proposed; set it to Auto to have them applied")
    if not plan.spec.feasible:
        share = f"; planned for {100 * plan.spec.planned_fraction:.0f} % of the load"
        return failing(_PLAN, "LeastBad", f"no plan satisfies every constraint: {plan.spec.reason}{share}")
    if drifted := plan.spec.explanation.drifted_accuracies:
        message = f"observed accuracy differs from the profile: {'; '.join(drifted[:4])}"
        return ok(_PLAN, "AccuracyDrifted", f"{message}. The plan uses the observed accuracy; check the inputs")
    return ok(_PLAN, "Optimal", f"the plan is optimal; binding constraint: {plan.spec.explanation.binding_constraint}")


def _amounts(tick: Tick, before: Mapping[str, Any]) -> dict[str, str | None]:
    served, in_force = tick.served, tick.plan
    rps = tick.load.mean_rps if tick.load is not None else None
    forecast = in_force.spec.forecast if in_force is not None else None
    amounts = {
        "rps": None if rps is None else _rounded(rps),
        "accuracy": None if served is None or served.accuracy is None else f"{served.accuracy:.3f}",
        "p99": None if served is None or served.p99_seconds is None else f"{_rounded(1000 * served.p99_seconds)}ms",
    }
    if tick.pipeline.spec.mode != "Auto":
        return amounts | {"forecast_rps": before.get("forecastRps"), "cost_per_hour": before.get("costPerHour")}
    expected = in_force.spec.expected if in_force is not None else None
    return amounts | {
        "forecast_rps": None if forecast is None else _rounded(forecast.peak_rps),
        "cost_per_hour": f"{expected.cost_per_hour:.4g}" if expected and expected.cost_by_flavor else None,
    }


def _shares(tick: Tick) -> dict[str, StageShares]:
    """Shares of rows of stages that several points answer, or should answer."""
    plan = None if tick.plan is None or tick.pipeline.spec.mode == "Advisory" else tick.plan
    expected = {} if plan is None else {stage.name: stage.expected_rows for stage in plan.spec.stages}
    return {
        name: StageShares(expected=describe_shares(rows), measured=describe_shares(tick.rows.get(name, {})))
        for name, rows in expected.items()
        if have_several_points(rows, tick.rows.get(name, {}))
    }


def _rounded(amount: float) -> str:
    """Two significant figures."""
    return f"{float(f'{amount:.2g}'):g}" if amount >= 0.05 else "0"


def _history(tick: Tick, before: Sequence[Mapping[str, Any]]) -> tuple[Decision, ...]:
    past = [Decision.model_validate(one) for one in before]
    if tick.decided == "changed" and tick.plan is not None and tick.pipeline.spec.mode == "Auto":
        past.insert(0, _decision(tick.plan, tick.now_seconds))
    return tuple(past[:MAX_HISTORY])


def _decision(plan: PipelinePlan, now_seconds: float) -> Decision:
    return Decision(
        generation=plan.spec.generation,
        time=rfc3339(now_seconds),
        change=plan.spec.explanation.change[:MAX_CHANGE_LENGTH],
        stages={stage.name: describe_option(stage) for stage in plan.spec.stages},
    )


def rejection_events(tick: Tick, before: Collection[str], pipeline: Object) -> list[Object]:
    """An Event for each replica that routers stopped using since the last tick."""
    return [
        event(
            pipeline,
            "ReplicaNotUsed",
            f"Requests no longer go to replica {replica}: {why}",
            decision=f"{replica} at {tick.now_seconds}",
            by=ADAPTER_MANAGER,
            now_seconds=tick.now_seconds,
            bad=True,
        )
        for replica, why in tick.rejected_replicas.items()
        if replica not in before
    ]


def plan_changed_event(tick: Tick, pipeline: Object) -> Object | None:
    if tick.decided != "changed" or tick.plan is None or tick.pipeline.spec.mode != "Auto":
        return None
    spec, now_seconds = tick.plan.spec, tick.now_seconds
    shortfall = "" if spec.feasible else f" Not every constraint can be satisfied: {spec.reason}"
    message = f"Plan {spec.generation}: {spec.explanation.change}.{shortfall}"
    fields = {"decision": f"plan {spec.generation} at {now_seconds}", "by": ADAPTER_MANAGER}
    return event(pipeline, "PlanChanged", message, **fields, now_seconds=now_seconds, bad=not spec.feasible)
