"""Repeated h2spec cases: a case fails if it fails each time; a lost race does not count."""

import pytest

from benchmarks.clients import h2spec as door
from benchmarks.clients.h2spec import Case, Report
from benchmarks.clients.target import WrongAnswerError

RACE, FAULT = Case("http2/6.1", "a race"), Case("http2/9.9", "a fault")
KNOWN = min(door.explained(door.EXPLAINED.read_text()))


def fake_runs(monkeypatch, *runs):
    """Let each h2spec run report these failed cases; returns the sections of each run."""
    left, asked = iter(runs), []

    def run(_, *sections):
        asked.append(sections)
        return Report(145, dict.fromkeys(next(left), "what came"))

    monkeypatch.setattr(door, "_run", run)
    return asked


def test_case_that_fails_once_is_run_again_and_reported(monkeypatch):
    section_filters = fake_runs(monkeypatch, [KNOWN, RACE], [])

    assert door.h2spec(None) == "145 cases, 1 fail and are explained, 1 failed once"  # type: ignore[arg-type]
    assert section_filters == [(), ("http2/6.1",)]


def test_case_that_fails_each_time_is_a_fault(monkeypatch):
    fake_runs(monkeypatch, [RACE, FAULT], [FAULT], [FAULT])

    with pytest.raises(WrongAnswerError, match=r"1 of 145 cases fail .* http2/9\.9 a fault: what came"):
        door.h2spec(None)  # type: ignore[arg-type]
