"""Events for `kubectl describe`: what changed and why, at most one for each decision. Pure.

An Event's name follows from what it says and of which plan, so that saying it again changes nothing.
"""

from trimtab_operator.objects import Object, uid_of
from trimtab_operator.replica_sets import fingerprint
from trimtab_operator.timestamps import written
from trimtab_pipelines.cluster import OPERATOR_MANAGER
from trimtab_pipelines.resource import API_VERSION
from trimtab_pipelines.spec import InferencePipeline

_MOST_TEXT = 1000


def notice(  # noqa: PLR0913  (of whom, what, why, when)
    pipeline: InferencePipeline, reason: str, message: str, about: str, now: float, *, bad: bool = False
) -> Object:
    """Return an Event about a pipeline; `about` identifies the decision it belongs to."""
    digits = fingerprint([uid_of(pipeline), reason, about])
    time = written(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pipeline.name}.{digits}", "namespace": pipeline.metadata.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "InferencePipeline",
            "name": pipeline.name,
            "namespace": pipeline.metadata.namespace,
            "uid": uid_of(pipeline),
        },
        "type": "Warning" if bad else "Normal",
        "reason": reason,
        "message": message[:_MOST_TEXT],
        "source": {"component": OPERATOR_MANAGER},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
