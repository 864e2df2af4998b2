"""A query of death costs two replicas, its neighbours nothing, and is then known; what must not run twice does not."""

import asyncio

import numpy as np

from tests.builders import a_stage
from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig
from tests.router.test_faults import PATIENT, answered
from tests.router.test_queue import a_work
from trimtab_router.scheduling.query_of_death import QueryOfDeathDetector


class Mortal(FakeReplica):
    """Dies of a 13."""

    async def start(self) -> "Mortal":
        self.model = self.compute
        self.deaths = 0
        await super().start()
        return self

    def compute(self, inputs):
        if 13 in inputs["x"]:
            self.deaths += 1
            self.cut()
        return {"y": inputs["x"] + np.float32(1)}


def deaths(replicas):
    return sum(replica.deaths for replica in replicas)


async def test_query_of_death_costs_two_replicas_then_is_rejected():
    replicas = [Mortal(name=f"r{n}") for n in range(5)]
    async with a_rig(a_pipeline(1), {"stage-0": replicas}, batchSize=4) as rig:
        for replica in replicas:
            replica.gate.clear()
        first = []
        for _ in replicas:  # one after the other, else two would share a batch and leave a replica idle
            first.append(asyncio.ensure_future(rig.rest(a_request(parameters=PATIENT))))
            await rig.until(lambda: sum(replica.arrived.is_set() for replica in replicas) == len(first))
        calls = [asyncio.ensure_future(rig.rest(a_request(value=value, parameters=PATIENT))) for value in (1, 13, 2, 3)]
        await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows == 4)
        for replica in replicas:
            replica.gate.set()
        await asyncio.gather(*first)
        answers = await asyncio.gather(*calls)

        for answer, value in zip([answers[0], *answers[2:]], (1, 2, 3), strict=True):
            answered(answer, 1, value)
        assert answers[1][:2] == (500, "stage stage-0: its model server failed; see the router's log")
        assert deaths(replicas) == 2

        for _ in range(3):
            status, message, headers = await rig.rest(a_request(value=13.0, parameters=PATIENT))
            assert (status, headers["x-trimtab-reason"]) == (400, "SuspectedQueryOfDeath"), message
        await rig.until_ready()
        answered(await rig.rest(a_request(value=4.0, parameters=PATIENT)), 1, 4)
        assert deaths(replicas) == 2


async def test_non_retryable_batch_is_not_sent_again():
    replicas = [Mortal(name=f"r{n}") for n in range(2)]
    pipeline = a_pipeline([a_stage("stage-0", retryable=False)])
    async with a_rig(pipeline, {"stage-0": replicas}) as rig:
        status, message, headers = await rig.rest(a_request(value=13.0, parameters=PATIENT), **{"x-request-id": "r-1"})

        assert (status, headers["x-trimtab-reason"]) == (500, "NotRepeatable")
        assert message == (
            "stage stage-0: its model server failed, maybe after it ran; the stage is not repeatable; "
            "see the router's log for request id 'r-1'"
        )
        assert deaths(replicas) == 1
        assert sum(len(replica.seen) for replica in replicas) == 1


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
