"""Event of a plan change with its reason; at most one per decision."""

from trimtab_adapter.tick import Tick
from trimtab_kubernetes.events import event
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.kubernetes_names import ADAPTER_MANAGER


def plan_changed_event(tick: Tick, pipeline: Object) -> Object | None:
    """The Event of a tick, or None if no plan in force changed."""
    if tick.decided != "changed" or tick.plan is None or tick.pipeline.spec.mode != "Auto":
        return None
    spec, now_seconds = tick.plan.spec, tick.now_seconds
    shortfall = "" if spec.feasible else f" Not every constraint can be satisfied: {spec.reason}"
    message = f"Plan {spec.generation}: {spec.explanation.change}.{shortfall}"
    fields = {"decision": f"plan {spec.generation} at {now_seconds}", "by": ADAPTER_MANAGER}
    return event(pipeline, "PlanChanged", message, **fields, now_seconds=now_seconds, bad=not spec.feasible)
