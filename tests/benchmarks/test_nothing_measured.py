"""Benchmarks without measurements: no threshold holds."""

import asyncio

import pytest

from benchmarks.cluster.faults import FAULTS, Suffered, named, outcome_of
from benchmarks.cluster.retrying import Retried
from benchmarks.fuzz.__main__ import outcome as fuzz_outcome
from benchmarks.fuzz.parts import Fuzzed
from benchmarks.hostile.course import Course
from benchmarks.hostile.phases import CALM, FRIENDLY_RPS, Phase, Seen
from benchmarks.hostile.report import Aftermath
from benchmarks.hostile.report import outcome as hostile_outcome
from benchmarks.layouts.asking import ChatResult
from benchmarks.layouts.phases import cut_streams, settled
from trimtab_loadtester.results import Record, Results, RunFacts
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.request_outcome import RequestOutcome

NOTHING_LEFT = Aftermath(0, 0, 0, 0)


def seen(count):
    found = Seen(good_seconds=[0.01] * count)
    found.codes["ok"] = count
    return found


def fuzzed():
    found = Fuzzed()
    found.note("REST bodies", 0, ["400"] * 20)
    found.memory_bytes = {"router": (100, 101)}
    return found


def test_a_fuzz_that_sent_nothing_does_not_hold():
    assert not fuzz_outcome(Fuzzed(), Seen(), NOTHING_LEFT, 1, 0.0).holds
    assert fuzz_outcome(fuzzed(), seen(200), NOTHING_LEFT, 1, 10.0).holds


@pytest.mark.parametrize("friendly", [0, int(0.4 * FRIENDLY_RPS * 10)])
def test_friendly_callers_who_ended_early_are_noticed(friendly):
    assert not fuzz_outcome(fuzzed(), seen(friendly), NOTHING_LEFT, 1, 10.0).holds
    course = Course(phases=[Phase("bombs", 0.0, 10.0), Phase(CALM, 10.0, 20.0)])
    assert not hostile_outcome(course, {CALM: seen(200), "bombs": seen(friendly)}, {}, NOTHING_LEFT).holds
    assert hostile_outcome(course, {CALM: seen(200), "bombs": seen(200)}, {}, NOTHING_LEFT).holds


def test_no_stream_cut_after_a_token_gives_no_time_to_error():
    whole, cut = ChatResult(whole=True, pieces=9), ChatResult(pieces=2, error="the replica is gone", ended_at=10.5)

    assert cut_streams([whole, ChatResult(error="too many", status=503)], 10.0)["writer_killed_cut_with_words"] == 0
    found = cut_streams([whole, cut], 10.0)
    assert (found["writer_killed_cut_with_words"], found["writer_killed_slowest_reason_seconds"]) == (1, 0.5)


def test_faults_that_did_not_happen_do_not_hold():
    assert not outcome_of([], 5.0).holds


@pytest.mark.parametrize(
    ("records", "holds"), [((), False), ((Record(0.0, 0.0, 0.1, RequestOutcome.OK, "200"),), True)]
)
def test_fault_without_requests_does_not_hold(records, holds):
    results = Results.of(RunFacts("digits", "constant:5", 30.0, 1.0, (), 0.0), records)

    assert outcome_of([Suffered(FAULTS[0], results, Retried(), 1.0)], 5.0).holds is holds


def test_faults_are_selected_by_parts_of_their_names():
    assert named([]) == list(FAULTS)
    assert [fault.name for fault in named(["adapter"])] == ["kill the adapter"]
    with pytest.raises(UserError, match=r"--only typo: no fault .*kill the adapter"):
        named(["adapter", "typo"])


def test_no_sustained_fixed_placement_skips_the_planned_one():
    class Asker:
        model = "lmm-digits"

        async def at_rate(self, *asked):
            pytest.fail(f"asked {asked}")

    share, note = asyncio.run(settled(None, Asker(), 1, 0.0))  # type: ignore[arg-type]

    assert share == 0.0
    assert "no fixed layout" in note
