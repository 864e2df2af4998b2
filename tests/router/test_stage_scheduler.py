"""Stage scheduler, with a fake clock and a fake transport."""

from typing import Any, cast

import numpy as np
import pytest

from tests.builders import a_pipeline, a_plan, a_variant
from tests.clocks import FakeClock
from tests.router.test_queue import Caller, a_work
from trimtab_pipelines.stages import Stage
from trimtab_router.request import NO_OPTIONS, RequestOptions
from trimtab_router.scheduling.batch_completion import QueryOfDeathDetector
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, WaitUntil
from trimtab_router.scheduling.replica_slots import (
    NOTHING,
    BatchFailed,
    Completed,
    NotReady,
    Rejected,
    ReplicaLost,
    ReplicaSlots,
)
from trimtab_router.scheduling.stage_request import StageRequest
from trimtab_router.scheduling.stage_scheduler import ArrivalRate, QueueSettings, StageScheduler

READY = frozenset({"small"})
FAST = {"name": "fast", "accuracy": 0.5}


class Scenario:
    """Scheduler of one stage, with its clock; the scenario is its transport and its statistics."""

    def begin(self, role, stage, plan, policy, drop_policy, slots):
        self.clock = FakeClock()
        self.stats_calls = []
        self.slots = [ReplicaSlots(f"slot-{n}") for n in range(slots)]
        self.scheduler = role(
            stage,
            plan=plan,
            settings=QueueSettings(1000, drop_policy, 10.0),
            policy=policy,
            clock=self.clock,
            transport=cast("Any", self),
            stats=self,
            query_of_death=QueryOfDeathDetector(),
        )
        for slot in self.slots:
            slot.set_ready_variants(READY)
        self.scheduler.set_replicas(self.slots)

    def settle(self, seconds=0.0):
        self.clock.run(self.clock.now + seconds)

    def submit(self, work):
        refusal = self.scheduler.refusal_of(work, self.clock.now)
        if refusal is None:
            self.scheduler.enqueue(work)
        return refusal or work

    def add_replica(self, replica):
        pass


class SchedulerScenario(Scenario):
    """Scheduler of a prediction stage."""

    def __init__(
        self, policy="EarliestDeadlineFirst", *, drop_policy="Predicted", slots=1, repeatable=True, stage=None, **plan
    ):
        points = [{"name": "default", "accuracy": 0.9}, FAST]
        pipeline = a_pipeline(1)
        described = pipeline.spec.stages[0].model_dump(by_alias=True) | {"retryable": repeatable}
        described |= {"variants": [a_variant(operatingPoints=points)]} | (stage or {})
        planned = a_plan(pipeline, **{"serviceSeconds": {1: 1.0, 8: 4.0}} | plan).spec.stages[0]
        policy = POLICIES[policy] if isinstance(policy, str) else policy
        self.sent = []
        self.begin(StageScheduler, Stage.model_validate(described), planned, policy, drop_policy, slots)

    def send(self, batch, ended):
        assert ended == self.scheduler.on_batch_end
        self.sent.append(batch)

    def __getattr__(self, name):
        if not name.startswith(("observe_", "count_", "record_")):
            raise AttributeError(name)
        if name.startswith(("observe_", "count_escalated", "count_low")):
            return lambda *_: None
        return lambda *values: self.stats_calls.append(str((name, *values)[-1]))

    def record_ejection(self, replica, reason):
        self.stats_calls.append(f"{replica} is ejected: {reason}")

    def record_ejection_end(self, replica):
        self.stats_calls.append(f"{replica} is used again")

    def forget_replica(self, replica):
        pass

    def take(self, rows=1, deadline=100.0, value=0.0, options=NO_OPTIONS):
        x = np.full((rows, 4), value, np.float32)
        certain = self.scheduler.stage.confidence is not None
        work = StageRequest(Caller(), "stage-0", rows, {"x": x}, deadline=deadline, now=self.clock.now, options=options)
        work.special |= certain
        return self.submit(work)

    def end(self, batch, ending=None):
        answers = [
            {"y": row_slice.array("x") + 1} if not row_slice.request.closed else {} for row_slice in batch.row_slices
        ]
        self.scheduler.on_batch_end(batch, ending or Completed(answers, batch.point.name))
        self.settle()


def why(work):
    return work.owner.refusal and work.owner.refusal.reason


def test_simultaneous_arrivals_are_dispatched_as_one_batch():
    top = SchedulerScenario()
    works = [top.take() for _ in range(3)]
    top.settle()

    assert [batch.rows for batch in top.sent] == [3]
    top.end(top.sent[0])
    assert all((work.owner.outputs["y"] == 1).all() for work in works)
    assert top.slots[0].free


@pytest.mark.parametrize(
    ("drop_policy", "deadline", "dropped_at", "reason"),
    [("Predicted", 3.0, 2.0, "DeadlineUnreachable"), ("Expired", 0.3, 0.3, "DeadlineExpired")],
)
def test_rows_are_dropped_at_their_drop_time(drop_policy, deadline, dropped_at, reason):
    top = SchedulerScenario(drop_policy=drop_policy)
    top.take()
    top.settle()
    patient, work = top.take(), top.take(deadline=deadline)
    top.clock.run(dropped_at - 0.001)
    assert why(work) is None

    top.clock.run(dropped_at + 0.001)
    assert (why(work), why(patient)) == (reason, None)
    assert top.scheduler.queue.rows == 1


@pytest.mark.parametrize(("policy", "reason"), [("EarliestDeadlineFirst", "DeadlineUnreachable"), ("SlackFit", None)])
def test_admission_and_drops_assume_the_fastest_allowed_point(policy, reason):
    quick = FAST | {"serviceSeconds": {1: 0.1, 8: 0.4}}
    top = SchedulerScenario(policy, fallbacks=[quick])
    top.take(8)
    top.settle()
    assert top.sent[0].point.name == "default"
    early = [top.take(deadline=6.0) for _ in range(8)]
    refusal = top.take(deadline=6.0)

    assert getattr(refusal, "reason", None) == reason
    if reason is None:
        top.clock.run(5.5)
        assert all(work.owner.refusal is None for work in early)
        top.end(top.sent[0])
        assert (top.sent[1].point.name, top.sent[1].rows) == ("fast", 8)


def test_rejected_rows_count_as_arrivals() -> None:
    top = SchedulerScenario("EarliestDeadlineFirst")
    top.take(8)
    top.settle()
    for _ in range(8):
        top.take(deadline=6.0)
    view = top.scheduler.view("small", top.clock.now)
    admitted_rps, refusal = view.arrivals_rps(), top.take(deadline=6.0)

    assert getattr(refusal, "reason", None) == "DeadlineUnreachable"
    assert view.arrivals_rps() > admitted_rps


@pytest.mark.parametrize(
    ("policy", "names"), [("EarliestDeadlineFirst", ["default", "fast"]), ("SlackFit", ["fast", "default"])]
)
def test_planned_points_are_listed_preferred_first(policy, names):
    better = FAST | {"accuracy": 0.95, "accuracyByTask": {"crops": 0.7}, "inputs": ["x"], "serviceSeconds": {1: 2.0}}
    model = SchedulerScenario(policy, upgrades=[better]).scheduler.latency_model
    points = model.points("small")

    assert [point.name for point in points] == names
    unknown = SchedulerScenario(policy, fallbacks=[FAST]).scheduler.latency_model
    assert [point.name for point in unknown.points("small")] == ["default"], "a point of unknown speed"
    assert model.key("small") == ("small", "default")
    described = {
        point.name: (point.accuracy_for("crops"), point.accuracy_for("faces"), point.inputs) for point in points
    }
    assert described == {"default": (0.9, 0.9, None), "fast": (0.7, 0.95, {"x"})}


@pytest.mark.parametrize(("task", "point"), [("", "default"), ("faces", "default"), ("crops", "fast")])
def test_task_of_most_urgent_row_orders_the_points(task, point):
    quick = FAST | {"serviceSeconds": {1: 0.1, 8: 0.4}, "accuracyByTask": {"crops": 0.99}}
    top = SchedulerScenario("SlackFit", fallbacks=[quick])
    top.take(options=RequestOptions(task=task))
    top.settle()

    assert top.sent[0].point.name == point


def test_plan_applies_to_the_next_batch():
    top = SchedulerScenario(batchSize=4)
    for _ in range(7):
        top.take()
    top.settle()
    plan = a_plan(a_pipeline(1), batchSize=2, operatingPoint="fast", serviceSeconds={1: 1.0, 8: 4.0})
    top.scheduler.apply_plan(plan.spec.stages[0])
    top.end(top.sent[0])

    assert [(batch.point.name, batch.rows) for batch in top.sent] == [("default", 4), ("fast", 2)]


def test_policy_may_wait_until_a_time():
    def hold_back(view):
        if view.now < 2.0:
            return WaitUntil(2.0)
        return Dispatch(view.points[0], list(view.waiting))

    top = SchedulerScenario(Policy(hold_back))
    top.take()
    top.clock.run(1.9)
    assert not top.sent

    top.clock.run(2.0)
    assert [batch.dispatched_at for batch in top.sent] == [2.0]


def test_policy_may_drop_any_slice():
    def drop_first(view):
        first, *others = view.waiting
        return Dispatch(view.points[0], others, [first])

    top = SchedulerScenario(Policy(drop_first))
    first, second = top.take(deadline=5.0), top.take(deadline=6.0)
    top.settle()

    assert why(first) == "DeadlineUnreachable"
    assert [row_slice.request for row_slice in top.sent[0].row_slices] == [second]
    assert top.scheduler.queue.rows == 0


def test_query_of_death_costs_two_replicas_and_no_neighbour():
    top = SchedulerScenario(slots=5)
    works = [top.take(value=value) for value in (1.0, 13.0, 2.0, 3.0)]
    top.settle()
    lost = []
    for batch in top.sent:  # grows with each retry
        if any(row_slice.array("x")[0, 0] == 13 for row_slice in batch.row_slices):
            lost.append(batch.replica)
            batch.replica.set_ready_variants(NOTHING)
            top.scheduler.refresh_replicas()
            top.end(batch, ReplicaLost("gone"))
        else:
            top.end(batch)

    assert [why(work) for work in works] == [None, "ModelServerError", None, None]
    assert len(set(lost)) == len(lost) == 2
    assert top.stats_calls[0:2] == ["gone; it held a batch of 4 slices", "ReplicaLost"]
    assert top.take(value=13.0).reason == "SuspectedQueryOfDeath"
    assert isinstance(top.take(value=4.0), StageRequest)


def lose(top, batch):
    """End a batch as if its replica's process had ended."""
    batch.replica.set_ready_variants(NOTHING)
    top.scheduler.refresh_replicas()
    top.end(batch, ReplicaLost("gone", disconnected=True))


def bring_back(top, replica):
    replica.set_ready_variants(frozenset({"small"}))
    top.scheduler.refresh_replicas()
    top.settle()


@pytest.mark.parametrize("drop_policy", ["Predicted", "Never"])
def test_suspects_wait_while_one_of_two_replicas_is_left(drop_policy):
    top = SchedulerScenario(slots=2, replicas=2, drop_policy=drop_policy)
    requests = [top.take(value=value, deadline=50.0) for value in (13.0, 1.0)]
    top.settle()
    lose(top, top.sent[0])
    neighbour = top.take(value=2.0)
    top.settle()
    assert [row_slice.request for batch in top.sent[1:] for row_slice in batch.row_slices] == [neighbour]

    top.clock.run(51.0)
    assert [why(request) for request in requests] == ["NoReplica", "NoReplica"]
    assert len(top.sent) == 2


def test_suspects_are_retried_one_at_a_time_beside_a_replica():
    top = SchedulerScenario(slots=2, replicas=2)
    poison, innocent = top.take(value=13.0), top.take(value=1.0)
    top.settle()
    lost = top.sent[0]
    lose(top, lost)
    bring_back(top, lost.replica)
    assert [batch.row_slices[0].request for batch in top.sent[1:]] == [poison]

    lose(top, top.sent[1])
    assert (why(poison), len(top.sent)) == ("ModelServerError", 2)
    bring_back(top, top.sent[1].replica)
    top.end(top.sent[2])
    assert (why(innocent), len(top.sent)) == (None, 3)
    assert top.take(value=13.0).reason == "SuspectedQueryOfDeath"


@pytest.mark.parametrize(
    ("code", "values", "outcomes"),
    [(-9, (13.0,), [None]), (3, (13.0,), ["ModelServerError"]), (-9, (13.0, 1.0), [None, None])],
)
def test_exit_code_decides_about_suspects_at_once(code, values, outcomes):
    top = SchedulerScenario(slots=2, replicas=2)
    requests = [top.take(value=value) for value in values]
    top.settle()
    lose(top, top.sent[0])
    top.scheduler.learn_exit_codes({top.sent[0].replica.name: code})
    top.settle()
    for batch in top.sent[1:]:
        top.end(batch)

    assert [why(request) for request in requests] == outcomes
    assert len(top.sent) == 2 - (code == 3)


def test_suspects_are_bounded_and_expire():
    suspects = QueryOfDeathDetector(max_suspects=3, refused_seconds=10.0)
    works = [a_work(rows=number + 1) for number in range(4)]
    for number, work in enumerate(works):
        suspects.add(work, float(number))

    assert len(suspects) == 3
    assert suspects.refusal_of(works[0], 4.0) is None  # the oldest made room
    assert suspects.refusal_of(works[1], 10.9) is not None
    assert suspects.refusal_of(works[1], 11.1) is None
    other = a_work(rows=4)
    other.inputs["x"][0, 0] = 99.0
    assert suspects.refusal_of(other, 4.0) is None
    assert suspects.refusal_of(works[3], 50.0) is None
    assert len(suspects) == 0


def test_undelivered_batch_is_not_suspected():
    top = SchedulerScenario(slots=1)
    work = top.take()
    top.settle()
    for _ in range(5):
        top.end(top.sent[-1], ReplicaLost("connection refused", delivered=False))

    assert why(work) is None
    assert len(top.sent) == 6


def test_prefetched_batch_is_not_blamed_for_the_one_before():
    top = SchedulerScenario(slots=1, serviceSeconds={})
    for _ in range(30):  # it learns how long batches take
        top.take(8)
        top.settle()
        batch = top.sent[-1]
        top.clock.run(top.clock.now + 0.1)
        outputs = [{"y": row_slice.array("x")} for row_slice in batch.row_slices]
        top.scheduler.on_batch_end(batch, Completed(outputs, batch.point.name, compute_seconds=0.099))
        top.settle()
    first, second = top.take(8), top.take(8)
    top.clock.run(top.clock.now + 0.0985)
    ahead = top.sent[-1]
    assert (top.sent[-2].found_idle, ahead.found_idle) == (True, False)

    top.slots[0].set_ready_variants(NOTHING)
    top.scheduler.refresh_replicas()
    for batch in top.sent[-2:]:
        top.end(batch, ReplicaLost("gone"))
    assert {row_slice.request: (row_slice.attempts, row_slice.alone) for row_slice in top.scheduler.queue} == {
        first: (1, True),
        second: (0, False),
    }


@pytest.mark.parametrize("returns", [True, False])
def test_batch_of_unready_replica_returns_to_the_queue(returns):
    top = SchedulerScenario()
    work = top.take()
    top.settle()
    top.slots[0].set_ready_variants(NOTHING)
    top.scheduler.refresh_replicas()
    top.end(top.sent[0], NotReady())

    assert [(row_slice.request, row_slice.attempts) for row_slice in top.scheduler.queue] == [(work, 0)]
    top.clock.run(9.9)
    assert why(work) is None
    if returns:
        top.slots[0].set_ready_variants(READY)
        top.scheduler.refresh_replicas()
    top.clock.run(10.1)
    assert (why(work), len(top.sent)) == ((None, 2) if returns else ("NoReplica", 1))


def test_only_the_invalid_row_of_a_rejected_batch_is_rejected():
    top = SchedulerScenario()
    works = [top.take(value=value) for value in (1.0, 13.0, 2.0)]
    top.settle()
    top.end(top.sent[0], Rejected("13"))
    for _ in works:
        batch = top.sent[-1]
        assert len(batch.row_slices) == 1
        top.end(batch, Rejected("13") if batch.row_slices[0].array("x")[0, 0] == 13 else None)

    assert [why(work) for work in works] == [None, "InvalidArgument", None]


@pytest.mark.parametrize(
    ("repeatable", "ending", "reason", "batches"),
    [
        (True, BatchFailed("nonsense"), "ModelServerError", 3),
        (True, BatchFailed("nonsense", retryable=False), "ModelServerError", 1),
        (False, BatchFailed("nonsense"), "NotRepeatable", 1),
        (False, ReplicaLost("nonsense"), "NotRepeatable", 1),
    ],
    ids=repr,
)
def test_failed_batch_is_retried_while_retryable(repeatable, ending, reason, batches):
    top = SchedulerScenario(repeatable=repeatable)
    work = top.take()
    top.settle()
    while why(work) is None:
        top.end(top.sent[-1], ending)

    assert (why(work), len(top.sent)) == (reason, batches)
    assert top.stats_calls[-1] == "nonsense"


def test_replica_is_free_again_after_malformed_outputs():
    top = SchedulerScenario()
    top.take()
    top.settle()
    top.sent[0].row_slices[0].request.owner.on_completed = None
    with pytest.raises(TypeError):
        top.scheduler.on_batch_end(top.sent[0], Completed([{}], "default"))

    assert top.slots[0].free


def test_arrival_rate_forgets_old_arrivals():
    pace = ArrivalRate(0.0)
    for n in range(100):
        pace.note(1, n * 0.01)

    assert pace.rps(1.0) == pytest.approx(100.0, rel=0.03)
    assert pace.rps(1.25) == pytest.approx(50.0, rel=0.03)
    assert pace.rps(5.0) == 0.0
    first = ArrivalRate(0.0)
    first.note(1, 0.001)
    assert first.rps(0.001) <= 4.0, "the first arrivals are no burst"
