"""Conditions that keep their transition times, events without duplicates, owners and timestamps."""

from typing import Any

from trimtab_kubernetes.conditions import MAX_MESSAGE, conditions, failing, ok
from trimtab_kubernetes.events import event
from trimtab_kubernetes.objects import owner_reference, parse_rfc3339, rfc3339, rfc3339_micro

NOW = 1_700_000_000.25
PIPELINE: dict[str, Any] = {
    "apiVersion": "trimtab.dev/v1alpha1",
    "kind": "InferencePipeline",
    "metadata": {"name": "sample", "namespace": "here", "uid": "u1"},
}


def test_transition_time_changes_with_the_status_only():
    (first,) = conditions([ok("Ready", "Fine", "")], [], 1, NOW)
    (same,) = conditions([ok("Ready", "Better", "")], [first], 2, NOW + 60)
    (other,) = conditions([failing("Ready", "Bad", "x" * 9999)], [same], 2, NOW + 90)

    assert first["lastTransitionTime"] == same["lastTransitionTime"] == rfc3339(NOW)
    assert (same["reason"], same["observedGeneration"]) == ("Better", 2)
    assert other["lastTransitionTime"] == rfc3339(NOW + 90)
    assert len(other["message"]) == MAX_MESSAGE


def event_of(about: dict[str, Any], decision: str, now_seconds: float = NOW) -> dict[str, Any]:
    return event(about, "PlanApplied", "why", decision=decision, by="operator", now_seconds=now_seconds)


def test_event_name_is_unique_per_decision():
    other = PIPELINE | {"metadata": PIPELINE["metadata"] | {"uid": "u2"}}
    names = [
        event_of(*about)["metadata"]["name"]
        for about in ((PIPELINE, "plan 1"), (PIPELINE, "plan 2"), (other, "plan 1"))
    ]

    assert event_of(PIPELINE, "plan 1", NOW + 5)["metadata"]["name"] == names[0]
    assert len(set(names)) == 3
    assert event_of(PIPELINE, "plan 1")["involvedObject"] == {
        "apiVersion": "trimtab.dev/v1alpha1",
        "kind": "InferencePipeline",
        "name": "sample",
        "namespace": "here",
        "uid": "u1",
    }


def test_owner_is_identified_by_its_uid():
    expected = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline", "name": "sample", "uid": "u1"}

    assert owner_reference(PIPELINE) == expected | {"controller": True}


def test_times_are_written_as_kubernetes_does():
    assert rfc3339(NOW) == "2023-11-14T22:13:20Z"
    assert rfc3339_micro(NOW) == "2023-11-14T22:13:20.250000Z"
    assert parse_rfc3339(rfc3339(NOW)) == int(NOW)
