"""The Event that says that a plan changed, and why: at most one for each decision. Pure."""

import uuid

from trimtab_adapter.cluster.status import rfc3339
from trimtab_adapter.tick import Tick
from trimtab_kubernetes.client import Object
from trimtab_pipelines.cluster import ADAPTER_MANAGER

MOST_MESSAGE = 1024


def event_of(tick: Tick, pipeline: Object) -> Object | None:
    """Return the event of a tick, or None where nothing changed that is in force."""
    if tick.decided != "changed" or tick.plan is None or tick.pipeline.spec.mode != "Auto":
        return None
    spec, metadata, now = tick.plan.spec, pipeline["metadata"], rfc3339(tick.now_seconds)
    shortfall = "" if spec.feasible else f" Not all constraints can be kept: {spec.reason}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": pipeline["apiVersion"],
            "kind": pipeline["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "type": "Normal" if spec.feasible else "Warning",
        "reason": "PlanChanged",
        "message": f"Plan {spec.generation}: {spec.explanation.change}.{shortfall}"[:MOST_MESSAGE],
        "source": {"component": ADAPTER_MANAGER},
        "reportingComponent": ADAPTER_MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
