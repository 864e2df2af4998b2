"""The served comparison's own arithmetic: who violates, which load is found, what a slower profile says."""

import pytest

from benchmarks.modalities.holding import held
from benchmarks.modalities.run import HEADS, Run
from benchmarks.modalities.searching import most_carried, violating
from benchmarks.modalities.setting import Jobs, slowed
from benchmarks.modalities.simulated import cheapest
from tests.builders import a_point_profile, a_profile
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.request_outcome import RequestOutcome


def a_run(records, rate=10.0):
    facts = RunFacts("digits-av", "constant:10", 2.0, 0.3, ("name",), 0.0)
    return Run("ours", rate, Results.of(facts, records), {"router": 0.25}, 1)


def a_record(outcome=RequestOutcome.OK, expected=0.8, floor=0.78, **changes):
    fields = {"correct": 4, "total": 5, "expected_accuracy": expected, "floor": floor} | changes
    return Record(0.0, 0.0, 0.1, outcome, "200", visits={"name": StageVisit("late", 8)}, **fields)


def test_late_or_below_the_floor_counts_as_violated():
    records = [
        a_record(),
        a_record(expected=0.7799),
        a_record(expected=0.7, escalation_pending=2, escalation_pending_correct=1),
        a_record(RequestOutcome.LATE),
        a_record(RequestOutcome.DROPPED, expected=float("nan"), correct=0, total=0),
    ]
    run = a_run(records)

    assert run.violations == pytest.approx(0.6)
    assert run.late == pytest.approx(0.4)
    assert run.dropped == 1
    assert run.answered_rows_rps == 5.0
    assert run.provisional(1000)[:2] == (2, 0.5)
    assert len(run.line(1000)) == len(HEADS)


def test_an_interval_counts_no_more_rows_than_were_drawn():
    run = a_run([a_record() for _ in range(100)])
    of_all, of_few = run.accuracy(10_000), run.accuracy(50)

    assert of_all[0] == of_few[0] == 0.8
    assert of_few[2] - of_few[1] > 3 * (of_all[2] - of_all[1])


class Imagined:
    """Carries so many jobs a second; of more, so much is violated as is too much."""

    def __init__(self, carries):
        self.carries, self.asked = carries, []

    async def offer(self, jobs, jobs_rps, seconds, seed=1):
        self.asked.append((jobs, jobs_rps, seconds, seed))
        bad = round(1000 * max(0.0, 1.0 - self.carries / jobs_rps))
        return a_run([a_record(RequestOutcome.LATE)] * bad + [a_record()] * (1000 - bad), jobs_rps)


@pytest.mark.parametrize("first", [40.0, 100.0, 180.0])
async def test_the_most_that_is_carried_is_found(first):
    served = Imagined(100.0)
    run = await most_carried(lambda rps: served.offer(Jobs("rows=1"), rps, 1.0), first)

    assert 95.0 < run.jobs_rps <= 101.1
    assert len(served.asked) <= 9


async def test_a_search_ends_as_soon_as_it_is_as_fine_as_asked():
    coarse, fine = Imagined(100.0), Imagined(100.0)
    run = await most_carried(lambda rps: coarse.offer(Jobs("rows=1"), rps, 1.0), 40.0, fineness=1.2)
    await most_carried(lambda rps: fine.offer(Jobs("rows=1"), rps, 1.0), 40.0)

    assert 100.0 / 1.2 < run.jobs_rps <= 101.1
    assert len(coarse.asked) < len(fine.asked)


async def test_the_load_that_violates_a_quarter_is_found():
    run = await violating(Imagined(120.0), Jobs("rows=1"), 0.25, 100.0, 1.0, lambda _: None)

    assert run.violations == pytest.approx(0.25, abs=0.03)


def test_a_slower_machine_takes_as_much_longer_for_all():
    profile = a_profile("name", [a_point_profile("late", 0.01, 0.001)])
    slow = slowed({"name": profile}, 2.0)["name"].spec.points[0]
    one = profile.spec.points[0]

    assert [m.latency_seconds_mean for m in slow.measurements] == pytest.approx(
        [2 * m.latency_seconds_mean for m in one.measurements]
    )
    assert slow.fit.seconds(8) == pytest.approx(2 * one.fit.seconds(8))
    assert slow.measurements[0].throughput_rps == pytest.approx(one.measurements[0].throughput_rps / 2)


def test_jobs_say_how_many_rows_they_have_on_average():
    assert Jobs("rows=8..24, floor=0.78").mean_rows == 16


def test_where_no_process_can_be_held_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.modalities.holding.ROOT", tmp_path)
    with held([1], 0.5) as is_held:
        assert not is_held


def test_maximum_load_is_that_of_the_cheapest_mix_at_the_floor():
    known = [(0.001, 0.6), (0.003, 0.75), (0.01, 0.8), (0.009, 0.7)]

    assert cheapest(known, 0.5) == 0.001
    assert cheapest(known, 0.675) == pytest.approx(0.002)
    assert cheapest(known, 0.8) == pytest.approx(0.01)
    with pytest.raises(ValueError, match=r"0\.81"):
        cheapest(known, 0.81)
