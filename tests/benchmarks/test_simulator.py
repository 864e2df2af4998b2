"""Calibration of the simulator benchmark: machine speed, and figures outside the profile."""

import time

import numpy as np
import pytest

from benchmarks.simulator.calibration import calibrate
from benchmarks.simulator.machine import MachineRecord, machine_record, probing, read_readings
from benchmarks.simulator.phases import BEFORE, Phase, PhaseSequence
from tests.builders import a_pipeline, a_point_profile, a_profile, a_stage, a_variant
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.request_outcome import RequestOutcome

BEGAN = 1_000.0
PHASES = PhaseSequence((Phase("light", 0.1, 100, BEFORE), Phase("20% of capacity", 0.2, 100, BEFORE)))


def readings(*parts, seconds=100.0, took=0.001, period=0.05):
    """Readings of a steady machine, changed by functions of (seconds, readings)."""
    at = np.arange(period, seconds, period)
    found = np.stack([at + BEGAN, np.full(at.size, took), np.zeros(at.size)], axis=1)
    for change in parts:
        change(at, found)
    return found


def slow(begin, until, factor):
    def change(at, found):
        found[(at >= begin) & (at < until), 1] *= factor

    return change


def away(at_second, seconds):
    def change(at, found):
        found[np.searchsorted(at, at_second), 2] = seconds

    return change


def test_the_same_work_taking_longer_is_a_slower_machine():
    found = machine_record([readings(slow(20, 40, 2.0)), readings(slow(20, 40, 2.0), took=0.003)], BEGAN, 100.0)

    usual = 1.0 / 1.2  # a fifth of the time twice as slow, and the mean is 1
    assert found.slowness_at(np.array([10.0, 30.0, 50.0, 99.9])) == pytest.approx(
        [usual, 2 * usual, usual, usual], rel=0.01
    )
    for speed in found.speeds:
        assert speed.finish(10.0, 1.0) - 10.0 == pytest.approx(usual, rel=0.01)
        assert speed.finish(30.0, 1.0) - 30.0 == pytest.approx(2 * usual, rel=0.01)
    assert found.paused_seconds == 0.0


def test_stolen_time_pauses_that_processor():
    """A pause that would reach back into the one before begins where that ended."""
    found = machine_record([readings(away(30.0, 0.2), away(50.0, 0.1), away(50.02, 0.1)), readings()], BEGAN, 100.0)

    first, second = found.speeds
    assert found.paused_seconds == pytest.approx((0.2 + 0.1 + 0.05) / 2, abs=0.01)
    assert first.finish(29.7, 0.2) - 29.7 == pytest.approx(0.4, abs=0.01)
    assert first.finish(49.8, 0.2) - 49.8 == pytest.approx(0.35, abs=0.02)
    assert second.finish(29.7, 0.2) - 29.7 == pytest.approx(0.2)


def test_batch_without_a_pause_is_unpaused():
    found = machine_record([readings(away(30.0, 0.2)), readings(away(50.0, 0.1))], BEGAN, 100.0)

    begun = np.array([29.0, 29.7, 29.9, 30.5, 49.95, 70.0])
    assert found.without_pause(begun, begun + 0.25).tolist() == [True, False, False, True, False, True]
    assert machine_record([], BEGAN, 100.0).without_pause(begun, begun + 0.25).all()


def test_phases_with_much_stolen_time_are_excluded():
    """Of five light phases one may go; with three of five gone the run has to be served again."""
    phases = PhaseSequence(tuple(Phase("light", 0.1, 20, BEFORE) for _ in range(5)))
    once = machine_record([readings(away(30.0, 0.9)), readings(away(30.0, 1.5))], BEGAN, 100.0)
    often = machine_record([readings(*(away(at, 2.0) for at in (10.0, 30.0, 50.0)))], BEGAN, 100.0)
    little = machine_record([readings(away(30.0, 0.9)), readings()], BEGAN, 100.0)

    assert once.paused(20.0, 40.0) == pytest.approx(1.2, abs=0.01)
    assert phases.without_disturbed(once).excluded == {1}
    assert phases.without_disturbed(once).is_sufficient
    assert phases.without_disturbed(once).names(np.array([10.0, 30.0, 50.0])).tolist() == ["light", "", "light"]
    latencies, answered = np.array([1.0, 9.0, 1.0]), np.array([True, False, True])
    figures = phases.without_disturbed(once).figures(np.array([10.0, 30.0, 50.0]), latencies, answered)
    assert figures == {"light": {"p50": 1.0, "p99": 1.0, "dropped": 0.0, "requests": 2}}
    assert phases.without_disturbed(often).excluded == {0, 1, 2}
    assert not phases.without_disturbed(often).is_sufficient
    assert not phases.without_disturbed(little).excluded


def test_phases_with_much_other_cpu_usage_are_excluded():
    phases = PhaseSequence(tuple(Phase("light", 0.1, 20, BEFORE) for _ in range(5)))
    others = np.stack([BEGAN + np.arange(1, 101), np.full(100, 0.04)], axis=1)
    others[20:40, 1] = 0.16  # of two processors
    found = machine_record([readings(), readings()], BEGAN, 100.0, others)

    assert found.taken(20.0, 40.0) == pytest.approx(20 * 0.08)
    assert phases.without_disturbed(found).excluded == {1}
    assert found.paused_seconds == 0.0


def test_processors_are_probed_as_long_as_asked_for(tmp_path):
    with probing(tmp_path / "probed") as files:
        awaited = {**dict.fromkeys(files, 4), tmp_path / "probed" / "others": 2}
        for _ in range(600):
            if all(file.exists() and file.read_text().count("\n") >= lines for file, lines in awaited.items()):
                break
            time.sleep(0.1)
    found, others = read_readings(tmp_path / "probed")

    assert len(found) == len(files)
    assert (others[:, 1] > -0.05).all()  # what is ours is none of it
    assert all((one[:, 1] > 0).all() and (np.diff(one[:, 0]) > 0).all() for one in found)


SERVICE = {"locate": (0.010, 0.010), "read": (0.005, 0.005)}
"""Of the profile: seconds beside and per row."""
RATIOS, CONTENTION, OVERHEAD, NOISE = {"locate": 1.3, "read": 0.7}, 0.25, 0.003, 0.05
P99_OVER_MEDIAN = 1.5
PAIRS_RATIO = 0.7  # two rows take that much of what the profile says, beside one row


def two_stages():
    sources = {"locate": "request.inputs.x", "read": "locate.outputs.y"}
    return a_pipeline([a_stage(name, source, variants=[a_variant(BEFORE[name])]) for name, source in sources.items()])


def its_profile(stage):
    point = a_point_profile(BEFORE[stage], *SERVICE[stage])
    measured = [m.replace(latency_seconds_p99=P99_OVER_MEDIAN * m.latency_seconds_p50) for m in point.measurements]
    return a_profile(stage, [point.replace(measurements=tuple(measured))])


def requests(begin, until, slowness, ratios):
    """Pairs of requests: the second one is located while the first one is read, and slowed by it."""
    rng = np.random.default_rng(3)
    for number, due in enumerate(np.arange(begin, until, 0.25).tolist()):
        rows = 1 + number % 4 // 3
        first = 0.0
        for beside in (False, True):
            factor = float(slowness.slowness_at(np.array([due]))[0])
            seconds = {
                stage: (constant + linear * rows)
                * ratios[stage]
                * factor
                * PAIRS_RATIO ** (rows - 1)
                * float(np.exp(rng.normal(0.0, NOISE)))
                for stage, (constant, linear) in SERVICE.items()
            }
            seconds["locate"] *= 1.0 + CONTENTION * beside
            sent = due + (first + 0.001 if beside else 0.0)
            first = seconds["locate"]
            visits = {stage: StageVisit(BEFORE[stage], rows, 0.0, each) for stage, each in seconds.items()}
            latency = sum(seconds.values()) + OVERHEAD
            yield Record(sent, sent, latency, RequestOutcome.OK, "200", total=rows, visits=visits)


def test_conditions_are_those_of_the_calibration_phases():
    """Speed, contention, spread and overhead come back; the phase that is compared has no say."""
    changing = MachineRecord(np.tile([0.8, 1.2], 200), ())
    others = dict.fromkeys(RATIOS, 5.0)
    records = [*requests(0.0, 100.0, changing, RATIOS), *requests(100.0, 200.0, changing, others)]
    unread = Record(
        50.0, 50.0, 0.02, RequestOutcome.OK, "200", visits={"locate": StageVisit("locate-xl", 1, 0.0, 0.01)}
    )
    facts = RunFacts("sample", "", 200.0, 0.4, ("locate", "read"), BEGAN)
    results = Results.of(facts, [*records, unread])

    profiles = {stage: its_profile(stage) for stage in SERVICE}
    found = calibrate(two_stages(), profiles, results.answered, PHASES, changing)

    assert found.contention == pytest.approx(CONTENTION, abs=0.03)
    assert found.before_seconds == pytest.approx(OVERHEAD)
    assert found.service_ratios == pytest.approx({(s, BEFORE[s]): ratio for s, ratio in RATIOS.items()}, rel=0.02)
    spreads = {key: float(np.std(np.log(each))) for key, each in found.factors.items()}
    assert spreads == pytest.approx({(s, BEFORE[s]): NOISE for s in RATIOS}, rel=0.15)
    for each in found.size_ratios.values():
        assert each == pytest.approx({1: 1.0, 2: PAIRS_RATIO}, rel=0.03)
    assert found.speeds == ()


def test_a_variant_that_was_not_profiled_is_named():
    results = Results.of(
        RunFacts("sample", "", 200.0, 0.4, ("locate", "read"), BEGAN),
        list(requests(0.0, 100.0, MachineRecord(np.empty(0), ()), RATIOS)),
    )
    profiles = {"locate": its_profile("locate"), "read": a_profile("read", [a_point_profile("other")])}

    with pytest.raises(ValueError, match=r"stage read: read-xl was served but not profiled with 1 cores"):
        calibrate(two_stages(), profiles, results.answered, PHASES, MachineRecord(np.empty(0), ()))
