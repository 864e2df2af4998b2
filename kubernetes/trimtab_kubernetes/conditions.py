"""Status conditions with transition times."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trimtab_kubernetes.objects import Object, rfc3339

Status = Literal["True", "False", "Unknown"]
MAX_MESSAGE = 2048
"""Maximum characters in Trimtab's kinds."""


@dataclass(frozen=True, slots=True)
class ConditionState:
    """A condition without transition time and generation."""

    type: str
    status: Status
    reason: str
    message: str


def ok(kind: str, reason: str, message: str) -> ConditionState:
    return ConditionState(kind, "True", reason, message)


def failing(kind: str, reason: str, message: str) -> ConditionState:
    return ConditionState(kind, "False", reason, message)


def conditions(
    findings: Iterable[ConditionState], before: Iterable[Mapping[str, Any]], generation: int, now_seconds: float
) -> list[Object]:
    """Conditions as stored; the transition time is preserved while the status is unchanged.

    `before` has the previous conditions, including those of other writers.
    """
    earlier = {condition["type"]: condition for condition in before}
    return [_condition(finding, earlier.get(finding.type, {}), generation, now_seconds) for finding in findings]


def _condition(finding: ConditionState, before: Mapping[str, Any], generation: int, now_seconds: float) -> Object:
    same = before.get("status") == finding.status
    return {
        "type": finding.type,
        "status": finding.status,
        "reason": finding.reason,
        "message": finding.message[:MAX_MESSAGE],
        "lastTransitionTime": before["lastTransitionTime"] if same else rfc3339(now_seconds),
        "observedGeneration": generation,
    }
