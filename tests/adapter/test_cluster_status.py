"""Status of a tick: reasons, transitions, bounded history, and no write for noise."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.adapter.scenes import a_ladder, plan_for
from tests.builders import a_pipeline, a_plan
from tests.kubernetes.test_objects import PIPELINE as BODY
from trimtab_adapter.cluster.config_source import ClusterCache, limit_to_schedulable
from trimtab_adapter.cluster.status import MAX_HISTORY, build_status, plan_changed_event, significant_fields
from trimtab_adapter.cluster.status_writer import MAX_QUEUED_EVENTS, StatusWriter
from trimtab_adapter.controller import Tick
from trimtab_adapter.observation import Load
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.events import MAX_MESSAGE
from trimtab_kubernetes.objects import rfc3339
from trimtab_pipelines.plan import ForecastRecord, RowShare
from trimtab_pipelines.router_state import RecentRequests
from trimtab_pipelines.row_shares import AnsweredBy
from trimtab_pipelines.status import Schedulable

PIPELINE = a_ladder()
NOW = 1_700_000_000.0


def a_tick(**changes) -> Tick:
    forecast = ForecastRecord(peak_rps=20.0, source="lstm", reason="no worse than reactive over 6: 5.1% against 5.9%")
    load = Load(NOW, (20.0,) * 60)
    return replace(Tick(NOW, PIPELINE, "kept", plan_for(PIPELINE, 20.0), load, forecast), **changes)


def reasons(tick: Tick) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in build_status(tick, {}, 3)["conditions"]}


def test_a_good_tick():
    tick = a_tick(served=RecentRequests(received=1200, ok=1190, p99_seconds=0.08349, accuracy=0.91234))

    status = build_status(tick, {}, 3)

    assert reasons(tick) == {
        "MetricsAvailable": ("True", "Fresh"),
        "ForecastReady": ("True", "LSTM"),
        "OptimizationReady": ("True", "Optimal"),
    }
    assert {c["observedGeneration"] for c in status["conditions"]} == {3}
    assert (status["rps"], status["forecastRps"], status["p99"], status["accuracy"]) == ("20", "20", "83ms", "0.912")


def short(reason: str) -> ForecastRecord:
    return ForecastRecord(peak_rps=1, source="reactive", reason=reason)


@pytest.mark.parametrize(
    ("changes", "condition", "expected"),
    [
        ({"load": Load(NOW, (0.0,) * 60)}, "MetricsAvailable", ("True", "NoTraffic")),
        ({"load": Load(NOW, (1.0,), "no answer from x")}, "MetricsAvailable", ("True", "Fresh")),
        ({"fault": "Stale", "decided": "held", "load": None}, "MetricsAvailable", ("False", "Stale")),
        ({"fault": "Stale", "decided": "held", "load": None}, "OptimizationReady", ("False", "HeldLast")),
        ({"decided": "held", "problem": "no profile"}, "OptimizationReady", ("False", "PlanningError")),
        ({"config_problem": "not YAML"}, "OptimizationReady", ("False", "PlanningError")),
        ({"plan": plan_for(PIPELINE, 1e5)}, "OptimizationReady", ("False", "LeastBad")),
        ({"pipeline": a_ladder(mode="Paused"), "decided": "paused"}, "OptimizationReady", ("True", "Paused")),
        ({"pipeline": a_ladder(mode="Advisory")}, "OptimizationReady", ("True", "Advisory")),
        ({"forecast": short("asked for")}, "ForecastReady", ("True", "Reactive")),
        ({"forecast": short("9 s of history, LSTM needs 120 s")}, "ForecastReady", ("True", "TooLittleHistory")),
        ({"forecast": short("the forecaster failed: OSError")}, "ForecastReady", ("False", "Failed")),
        ({"forecast": short("lstm forecast inf requests/s, which is invalid")}, "ForecastReady", ("False", "Failed")),
    ],
)
def test_reasons_are_stable(changes, condition, expected):
    assert reasons(a_tick(**changes))[condition] == expected


def test_a_transition_is_timed_once():
    first = build_status(a_tick(), {}, 1)
    later = build_status(a_tick(now_seconds=NOW + 60), first, 2)
    ill = build_status(a_tick(now_seconds=NOW + 90, decided="held", fault="Missing", load=None), later, 2)

    def since(status) -> str:
        return next(str(c["lastTransitionTime"]) for c in status["conditions"] if c["type"] == "MetricsAvailable")

    assert since(first) == since(later) == rfc3339(NOW)
    assert since(ill) == rfc3339(NOW + 90)


def test_noise_is_not_worth_a_write():
    before = build_status(a_tick(), {}, 1)
    noise = ForecastRecord(peak_rps=20.1, source="lstm", reason="no worse than reactive over 7: 5.3% against 6.0%")
    same = build_status(a_tick(load=Load(NOW, (20.2,) * 60), forecast=noise), before, 1)
    other = build_status(a_tick(load=Load(NOW, (40.0,) * 60)), before, 1)

    assert significant_fields(same) == significant_fields(before)
    assert significant_fields(other) != significant_fields(before)


def test_others_conditions_are_left_to_them():
    theirs = {"type": "StagesReady", "status": "True", "reason": "AllReady", "lastTransitionTime": rfc3339(NOW)}

    status = build_status(a_tick(), {"conditions": [theirs], "url": "http://here"}, 1)

    assert "StagesReady" not in {c["type"] for c in status["conditions"]}
    assert "url" not in status
    assert "stages" not in status


def test_history_is_the_latest_changes_only():
    status: dict[str, Any] = {}
    for generation in range(1, MAX_HISTORY + 6):
        status = build_status(a_tick(decided="changed", plan=a_plan(PIPELINE, generation)), status, 1)
    kept = build_status(a_tick(), status, 1)

    assert [one["generation"] for one in kept["history"]] == list(range(MAX_HISTORY + 5, 5, -1))


def test_one_event_for_each_change_and_none_else():
    event = plan_changed_event(a_tick(decided="changed"), BODY)

    assert event is not None
    assert event["message"].startswith("Plan 1: first plan")
    assert len(event["message"]) <= MAX_MESSAGE
    assert event["type"] == "Normal"
    assert plan_changed_event(a_tick(), BODY) is None
    assert plan_changed_event(a_tick(decided="changed", pipeline=a_ladder(mode="Advisory")), BODY) is None
    least_bad = plan_changed_event(a_tick(decided="changed", plan=plan_for(PIPELINE, 1e5)), BODY)
    assert least_bad is not None
    assert least_bad["type"] == "Warning"


class Slow:
    """Takes down what is written, once `open` is set."""

    def __init__(self) -> None:
        self.open, self.asked = asyncio.Event(), asyncio.Event()
        self.statuses: list[dict[str, Any]] = []
        self.events: list[str] = []

    async def apply(self, body: dict[str, Any], **_: Any) -> None:
        self.asked.set()
        await self.open.wait()
        self.statuses.append(body["status"])

    async def create(self, body: dict[str, Any], **_: Any) -> None:
        self.asked.set()
        await self.open.wait()
        self.events.append(body["message"].partition(":")[0])


async def test_report_during_a_write_does_not_wait_for_the_next_tick():
    """A whole interval may pass until then, or, at the end, none may come."""
    cluster, known = Slow(), ClusterCache()
    known.put(BODY)
    reporter = StatusWriter(cast("Cluster", cluster), known, ("here", "sample"))

    for generation in range(1, MAX_QUEUED_EVENTS + 4):
        reporter.report(a_tick(decided="changed", plan=a_plan(PIPELINE, generation)))
        await cluster.asked.wait()
    cluster.open.set()
    await reporter.close()

    assert cluster.statuses[-1]["history"][0]["generation"] == MAX_QUEUED_EVENTS + 3
    assert cluster.events == [f"Plan {n}" for n in range(4, MAX_QUEUED_EVENTS + 4)]


async def test_each_ejection_of_a_replica_has_an_event():
    cluster, known = Slow(), ClusterCache()
    known.put(BODY)
    reporter = StatusWriter(cast("Cluster", cluster), known, ("here", "sample"))
    cluster.open.set()
    ejected = a_tick(rejected_replicas={"pod-3 of stage first": "ejected as an outlier: 2 consecutive batches failed"})

    for second, tick in enumerate((a_tick(), ejected, ejected, a_tick(), ejected)):
        reporter.report(replace(tick, now_seconds=NOW + second))
    await reporter.close()

    assert cluster.events == ["Requests no longer go to replica pod-3 of stage first"] * 2


ROOM = Schedulable(cores="2", since="2026-01-01T00:00:00Z").model_dump(mode="json", by_alias=True)


def limited_pipeline(schedulable):
    pipeline = a_pipeline(1, budget={"cores": "8", "gpus": 1})
    return limit_to_schedulable(pipeline.replace(status={"schedulable": schedulable}))


@pytest.mark.parametrize(
    ("status", "budget", "remark"),
    [
        (ROOM, (2.0, 0), "the nodes can schedule 2 cores and 0 GPUs of the budget's 8 cores and 1 GPUs"),
        (ROOM | {"cores": "9", "gpus": 1, "memory": "4Gi"}, (8.0, 1), ""),  # a field of a later release is ignored
        (None, (8.0, 1), ""),
    ],
)
def test_schedulable_capacity_limits_the_budget(status, budget, remark):
    pipeline, found = limited_pipeline(status)

    assert (pipeline.spec.budget.cores, pipeline.spec.budget.gpus) == budget
    assert found == remark


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (ROOM | {"cores": "two"}, "'two' is not a quantity"),
        (ROOM | {"cores": 2}, "cores"),
        (ROOM | {"gpus": "one"}, "gpus"),
        ({}, "cores"),
        (["2"], "cores"),
    ],
)
def test_invalid_status_is_named_and_limits_nothing(wrong, detail):
    pipeline, remark = limited_pipeline(wrong)
    assert pipeline.spec.budget.cores == 8.0
    assert remark.startswith("status.schedulable cannot be read, so the whole budget is used: ")
    assert detail in remark


def test_status_has_expected_and_measured_shares():
    shares = (RowShare(variant="light", share=0.9), RowShare(variant="heavy", share=0.1, escalated=True))
    plan = plan_for(PIPELINE, 20.0)
    first, *others = plan.spec.stages
    stages = (first.replace(shares=shares), *others)
    plan = plan.with_spec(stages=stages)
    rows = {first.name: {AnsweredBy("light", "default"): 80.0, AnsweredBy("heavy", "default", escalated=True): 20.0}}
    status, quiet = build_status(a_tick(plan=plan, rows=rows), {}, 1), build_status(a_tick(plan=plan), {}, 1)

    expected = "90 % light, 10 % escalated to heavy"
    assert status["shares"] == {first.name: {"expected": expected, "measured": "80 % light, 20 % escalated to heavy"}}
    assert quiet["shares"] == {first.name: {"expected": expected, "measured": ""}}
    assert "shares" not in build_status(a_tick(), {}, 1)
