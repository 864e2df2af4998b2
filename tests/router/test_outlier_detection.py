"""Outlier detection: replicas that fail or are slow while others are not."""

import pytest

from tests.router.test_generation import Writers, write_all
from tests.router.test_stage_scheduler import READY, SchedulerScenario
from trimtab_router.scheduling.outlier_detection import BASE_EJECTION_SECONDS, MAX_EJECTION_SECONDS
from trimtab_router.scheduling.replica_slots import BatchFailed

FAILED = BatchFailed("500: CUDA error")


class Fleet(SchedulerScenario):
    """Replicas that serve each batch after `seconds`; the names in `failing` fail it at once."""

    def __init__(self, replicas=2, failing=(), **options):
        super().__init__(slots=replicas, batchSize=1, serviceSeconds={1: 0.1}, **options)
        self.failing, self.seconds, self.served_by, self.refused = set(failing), {}, [], []

    def serve(self, requests=1, interval=0.2):
        """Let requests arrive one after the other, and serve what is dispatched."""
        works = []
        for _ in range(requests):
            works.append(self.take(deadline=self.clock.now + 100.0))
            self.settle()
            self.work()
            self.clock.run(self.clock.now + interval)
        self.refused += [work for work in works if work.owner.refusal]
        return works

    def work(self):
        while self.sent:
            batch = self.sent.pop(0)
            self.served_by.append(batch.replica.name)
            if batch.replica.name in self.failing:
                self.end(batch, FAILED)
            else:
                self.clock.run(self.clock.now + self.seconds.get(batch.replica.name, 0.1))
                self.end(batch)

    @property
    def ejected(self):
        return [slot.name for slot in self.scheduler.outliers.ejected]

    def until_probe(self):
        self.clock.run(self.clock.now + MAX_EJECTION_SECONDS)


def test_failing_replica_is_ejected_and_no_request_fails():
    fleet = Fleet(failing={"slot-0"})
    fleet.serve(10)

    assert fleet.refused == []
    assert fleet.ejected == ["slot-0"]
    assert fleet.served_by.count("slot-0") <= 4
    assert "slot-0 is ejected: 2 consecutive batches failed" in fleet.stats_calls


def test_ejected_replica_returns_after_a_good_probe():
    fleet = Fleet(failing={"slot-0"})
    fleet.serve(5)
    fleet.failing = set()
    fleet.clock.run(fleet.clock.now + BASE_EJECTION_SECONDS)
    fleet.serve(4)

    assert fleet.ejected == []
    assert "slot-0 is used again" in fleet.stats_calls


def test_failed_probe_lengthens_the_ejection():
    fleet = Fleet(failing={"slot-0"})
    fleet.serve(300)

    assert fleet.refused == []
    assert fleet.ejected == ["slot-0"]
    assert fleet.served_by.count("slot-0") <= 4 + 60.0 / MAX_EJECTION_SECONDS + 4


def test_request_that_fails_everywhere_ejects_no_replica():
    fleet = Fleet()
    for _ in range(20):
        fleet.failing = {"slot-0", "slot-1"}
        fleet.serve(1)
        fleet.failing = set()
        fleet.serve(1)

    assert len(fleet.refused) == 20
    assert fleet.ejected == []


def test_at_most_half_of_the_replicas_are_ejected():
    fleet = Fleet(replicas=3, failing={"slot-0", "slot-1"})
    fleet.serve(30)

    assert len(fleet.ejected) == 1
    fleet.slots[2].set_ready_variants(frozenset())
    fleet.scheduler.refresh_replicas()
    assert len(fleet.ejected) == 1
    fleet.slots[1].set_ready_variants(frozenset())
    fleet.scheduler.refresh_replicas()
    assert fleet.ejected == []


def test_single_replica_is_never_ejected():
    fleet = Fleet(replicas=1, failing={"slot-0"})
    fleet.serve(5)

    assert len(fleet.refused) == 5
    assert fleet.ejected == []


def test_failures_of_rows_that_may_not_repeat_count_at_once():
    fleet = Fleet(repeatable=False, failing={"slot-0"})
    fleet.serve(20)

    assert fleet.ejected == ["slot-0"]
    assert len(fleet.refused) <= 5


@pytest.mark.parametrize(("seconds", "ejected"), [(0.4, ["slot-0"]), (0.15, [])])
def test_replica_that_is_much_slower_than_its_peers_is_ejected(seconds, ejected):
    fleet = Fleet()
    fleet.seconds = {"slot-0": seconds}
    fleet.serve(12)

    assert fleet.ejected == ejected
    fleet.seconds = {}
    fleet.until_probe()
    fleet.serve(4)
    assert fleet.ejected == []


def test_single_slow_batch_ejects_no_replica():
    fleet = Fleet()
    fleet.serve(12)
    fleet.seconds = {"slot-0": 5.0, "slot-1": 5.0}
    fleet.serve(1)
    fleet.seconds = {}
    fleet.serve(4)

    assert fleet.ejected == []
    assert not any("is ejected" in str(call) for call in fleet.stats_calls)


def test_late_first_tokens_eject_a_replica_of_a_generation_stage():
    top = Writers(slots=2, places=4, serviceSeconds={1: 0.1})
    for _ in range(20):
        top.take()
        write_all(top, top.sent[-1], 1.0 if top.sent[-1].replica.name == "slot-0" else 0.1)
    assert [slot.name for slot in top.scheduler.outliers.ejected] == ["slot-0"]

    top.settle(MAX_EJECTION_SECONDS)
    for _ in range(4):
        top.take()
        write_all(top, top.sent[-1], 0.1)
    assert top.scheduler.outliers.ejected == []


def test_overloaded_replica_gets_no_batch_until_it_recovers():
    fleet = Fleet()
    for slot in fleet.slots:
        slot.overload = "its event loop lagged"
        fleet.scheduler.refresh_replicas()
    fleet.serve(20)

    assert fleet.ejected == ["slot-0"]
    assert set(fleet.served_by) == {"slot-1"}
    assert "slot-0 is ejected: its event loop lagged" in fleet.stats_calls
    for slot in fleet.slots:
        slot.overload = ""
    fleet.until_probe()
    fleet.serve(4)
    assert fleet.ejected == []


def test_replica_that_restarts_is_no_longer_ejected():
    fleet = Fleet(failing={"slot-0"})
    fleet.serve(5)
    fleet.slots[0].set_ready_variants(frozenset())
    fleet.scheduler.refresh_replicas()
    fleet.slots[0].set_ready_variants(READY)
    fleet.scheduler.refresh_replicas()

    assert fleet.ejected == []
    assert fleet.slots[0].free
