"""Conditions of a status: what was found, and since when it is so. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trimtab_kubernetes.objects import Object
from trimtab_kubernetes.times import rfc3339

Status = Literal["True", "False", "Unknown"]
MAX_MESSAGE = 2048
"""Characters that our kinds allow."""


@dataclass(frozen=True, slots=True)
class ConditionState:
    """A condition without its bookkeeping."""

    type: str
    status: Status
    reason: str
    message: str


def ok(kind: str, reason: str, message: str) -> ConditionState:
    """A condition that is true."""
    return ConditionState(kind, "True", reason, message)


def failing(kind: str, reason: str, message: str) -> ConditionState:
    """A condition that is not."""
    return ConditionState(kind, "False", reason, message)


def conditions(
    findings: Iterable[ConditionState], before: Iterable[Mapping[str, Any]], generation: int, now_seconds: float
) -> list[Object]:
    """The conditions as written; the time of transition stays where the status stays.

    Args:
        findings: one for each condition.
        before: the conditions as they were, others' among them.
        generation: of the object that was looked at.
        now_seconds: Unix time.
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
