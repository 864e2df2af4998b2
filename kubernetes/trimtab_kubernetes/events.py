"""Kubernetes Events, at most one for each decision.

The name of an Event is derived from its reason and decision, so that creating it again is a conflict.
"""

from collections.abc import Mapping
from typing import Any

from trimtab_kubernetes.objects import Object, fingerprint, rfc3339

MAX_MESSAGE = 1024
"""Maximum characters of the API server."""


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
    """An Event about an object, of the same name for the same reason and decision.

    `reason` is stable, in CamelCase; `bad` makes it a Warning. A long message is truncated.
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
