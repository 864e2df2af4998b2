"""Scheduler of a generation stage: concurrent rows in a replica, times to first tokens, rows without a client."""

from typing import Any

import numpy as np
import pytest

from tests.builders import a_plan
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.test_queue import Caller
from tests.router.test_stage_scheduler import Scenario, why
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.replica_slots import BatchFailed, Cancelled, Completed, NotReady, ReplicaLost, StreamCut
from trimtab_router.scheduling.roles import GenerationScheduler
from trimtab_router.scheduling.stage_request import StageRequest

LAST = LastChunk("", "stop", Usage(3, 2, 0, 0, 3))
OUTPUTS = {"text": np.array([b"a b"], object), "finish_reason": np.array([b"stop"], object), "usage": np.zeros((1, 5))}


class Writers(Scenario):
    """Scheduler of a generation stage."""

    def __init__(self, pipeline=None, *, slots=1, places=4, retryable=True, drop_policy="Predicted", **plan):
        pipeline = pipeline or a_chat_pipeline([a_writer(retryable=retryable)])
        self.under_way: dict[Any, Any] = {}
        self.wrote: Any = None
        planned, policy = a_plan(pipeline, batchSize=places, **plan), POLICIES["EarliestDeadlineFirst"]
        stage, planned_stage = pipeline.spec.stages[-1], planned.spec.stages[-1]
        self.begin(GenerationScheduler, stage, planned_stage, policy, drop_policy, slots)

    def send(self, batch, ended):  # noqa: ARG002 - a stage that writes carries nothing
        raise AssertionError(batch)

    def stream(self, batch, wrote, ended):
        assert batch.rows == 1
        self.under_way[batch] = ended
        self.wrote = wrote

    def cancel(self, batch):
        self.clock.call_when_idle(lambda: self.end(batch, Cancelled()), lambda: None)

    def end(self, batch, ending=None):
        self.under_way.pop(batch)(batch, ending or Completed((OUTPUTS,), batch.point.name))

    def __getattr__(self, name):
        if not name.startswith(("observe_", "count_", "record_")):
            raise AttributeError(name)
        return lambda *values: self.stats_calls.append((name, *values))

    def take(self, rows=1, deadline=100.0, *, has_listener=False):
        caller = Caller()
        caller.has_listener = has_listener
        work = StageRequest(
            caller, "text", rows, {"messages": np.array([b"m"] * rows, object)}, deadline=deadline, now=self.clock.now
        )
        return self.submit(work)

    def submit(self, work):
        submitted = super().submit(work)
        self.settle()
        return submitted

    @property
    def sent(self):
        return list(self.under_way)


def given(work) -> Any:
    return work.owner.outputs


def test_rows_are_dispatched_until_capacity_is_used():
    top = Writers(places=3)
    works = [top.take(rows=2), top.take(), top.take()]

    assert [batch.row_slices[0].request for batch in top.sent] == [works[0], works[0], works[1]]
    assert not top.slots[0].free
    top.end(top.sent[0])
    top.settle()
    assert [batch.row_slices[0].request for batch in top.sent] == [works[0], works[1], works[2]]
    assert works[0].owner.outputs is None
    top.end(top.sent[0])
    assert list(given(works[0])["text"]) == [b"a b", b"a b"]


def test_least_loaded_replica_is_next_and_plan_sets_capacity():
    top = Writers(slots=2, places=2)
    for _ in range(3):
        top.take()
    assert sorted(slot.inflight for slot in top.slots) == [1, 2]

    top.scheduler.apply_plan(top.scheduler.plan.replace(batch_size=1))
    top.take()
    assert len(top.sent) == 3
    assert top.scheduler.queue.rows == 1


def test_time_to_first_token_is_learned():
    top = Writers()
    work = top.take()
    (batch,) = top.sent
    top.settle(2.0)
    top.wrote(batch, Chunk("a "))
    top.settle(30.0)
    top.wrote(batch, LAST)
    top.end(batch)

    assert work.owner.heard == [(0, Chunk("a ")), (0, LAST)]
    assert top.scheduler.latency_model.service_seconds(1) == pytest.approx(2.0)
    assert top.scheduler.capacity().seconds == pytest.approx(32.0)
    assert [call[0] for call in top.stats_calls if call[0] == "observe_batch"] == ["observe_batch"]


def write_all(top, batch, seconds):
    top.settle(seconds)
    top.wrote(batch, Chunk("a "))
    top.wrote(batch, LAST)
    top.end(batch)
    top.settle()


def test_concurrent_prefills_are_part_of_the_prediction():
    top = Writers(places=4, serviceSeconds={1: 0.05, 4: 0.2})
    assert top.scheduler.latency_model.typical_seconds() == pytest.approx(0.05)
    for _ in range(3):
        top.take()
    for _ in range(60):
        top.take()
        write_all(top, top.sent[-1], 0.2)

    assert top.scheduler.latency_model.typical_seconds() == pytest.approx(0.2)
    assert top.scheduler.latency_model.service_ratio == pytest.approx(1.0)
    late = top.take(deadline=top.clock.now + 0.1)
    assert why(late) == "DeadlineUnreachable"
    for batch in top.sent:
        top.end(batch)
    top.settle()
    alone = top.take(deadline=top.clock.now + 0.1)
    assert [batch.row_slices[0].request for batch in top.sent] == [alone]


def test_decoding_rows_do_not_count_as_prefills():
    top = Writers(places=4, serviceSeconds={1: 0.05, 4: 0.2})
    for _ in range(3):
        top.take()
        top.settle(0.05)
        top.wrote(top.sent[-1], Chunk("a "))

    assert top.slots[0].inflight == 3
    assert top.slots[0].concurrent_prefills == 0
    in_time = top.take(deadline=top.clock.now + 0.1)
    assert top.sent[-1].row_slices[0].request is in_time
    assert top.slots[0].concurrent_prefills == 1


def test_row_is_rejected_if_capacity_frees_too_late():
    top = Writers(places=2)
    for _ in range(2):
        top.take()
    top.settle(2.0)
    for batch in top.sent:
        top.wrote(batch, Chunk("a"))
    top.settle(18.0)
    for batch in top.sent:
        top.end(batch)
    # A place becomes free every 10 s, and a first piece takes 2 s; a fifth of what is left is not promised away.
    for _ in range(2):
        top.take(deadline=1000.0)
    assert isinstance(top.take(deadline=top.clock.now + 13.0), StageRequest)
    refusal = top.take(deadline=top.clock.now + 14.0)
    assert (refusal.reason, refusal.stage) == ("DeadlineUnreachable", "text")
    assert isinstance(top.take(deadline=top.clock.now + 16.0), StageRequest)


def test_disconnected_client_frees_its_rows_everywhere():
    top = Writers(places=2)
    work = top.take(rows=3)
    other = top.take()
    assert len(top.sent) == 2
    top.scheduler.cancel(work)
    top.settle()

    assert [batch.row_slices[0].request for batch in top.sent] == [other]
    assert top.slots[0].inflight == 1
    assert top.stats_calls.count(("count_cancelled_row",)) == 2
    assert top.scheduler.queue.rows == 0


def test_cut_stream_of_non_retryable_stage_fails():
    top = Writers(retryable=False)
    work = top.take()
    top.end(top.sent[0], StreamCut("gone"))

    assert why(work) == "NotRepeatable"


def test_lost_replica_with_many_rows_blames_none():
    top = Writers()
    works = [top.take(), top.take()]
    for _ in range(3):
        for batch in top.sent:
            top.end(batch, ReplicaLost("gone"))
        top.settle()
    assert [why(work) for work in works] == [None, None]

    top.end(top.sent[0], ReplicaLost("gone"))
    assert [why(work) for work in works] == ["ModelServerError", None]
    assert isinstance(top.take(), StageRequest), "what is like it is no suspect"


@pytest.mark.parametrize("ending", [NotReady(), ReplicaLost("gone", delivered=False), BatchFailed("500")])
def test_row_without_token_is_retried_elsewhere(ending):
    top = Writers()
    work = top.take(has_listener=True)
    top.end(top.sent[0], ending)
    top.settle()

    assert why(work) is None
    top.end(top.sent[0])
    assert list(given(work)["text"]) == [b"a b"]
