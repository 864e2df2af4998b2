"""Events for `kubectl describe`: what changed and why, at most one for each decision. Pure.

An Event's name follows from what it says and of which decision, so that saying it again changes nothing.
"""

from collections.abc import Mapping
from typing import Any

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_kubernetes.times import rfc3339

MAX_MESSAGE = 1024
"""Characters that the API server takes."""


def event(
    about: Mapping[str, Any],
    reason: str,
    message: str,
    *,
    decision: str,
    by: str,
    now_seconds: float,
    bad: bool = False,
) -> Object:
    """An Event about an object.

    Args:
        about: the object, or as much of it as names it: apiVersion, kind, name, namespace and uid.
        reason: CamelCase, stable.
        message: what happened and why; cut where it is too long.
        decision: names the decision that is told of.
        by: the component that tells.
        now_seconds: Unix time.
        bad: a Warning.
    """
    metadata, time = about["metadata"], rfc3339(now_seconds)
    digits = fingerprint([metadata["uid"], reason, decision])
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{digits}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            **{key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion") if key in metadata},
        },
        "type": "Warning" if bad else "Normal",
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "source": {"component": by},
        "reportingComponent": by,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
