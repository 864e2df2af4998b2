"""A case of h2spec counts as failed where it fails each time; a race that is lost once does not."""

import pytest

from benchmarks.clients import h2spec as door
from benchmarks.clients.h2spec import Case, Report
from benchmarks.clients.target import WrongAnswerError

RACE, FAULT = Case("http2/6.1", "a race"), Case("http2/9.9", "a fault")
KNOWN = min(door.explained(door.EXPLAINED.read_text()))


def told(monkeypatch, *runs):
    """Have h2spec tell this of its runs, one after the other; returns which sections each was asked for."""
    left, asked = iter(runs), []

    def run(_, *sections):
        asked.append(sections)
        return Report(145, dict.fromkeys(next(left), "what came"))

    monkeypatch.setattr(door, "_run", run)
    return asked


def test_what_fails_once_is_run_again_and_told(monkeypatch):
    asked = told(monkeypatch, [KNOWN, RACE], [])

    assert door.h2spec(None) == "145 cases, 1 fail and are explained, 1 failed once"  # type: ignore[arg-type]
    assert asked == [(), ("http2/6.1",)]


def test_what_fails_each_time_is_a_fault(monkeypatch):
    told(monkeypatch, [RACE, FAULT], [FAULT], [FAULT])

    with pytest.raises(WrongAnswerError, match=r"1 of 145 cases fail .* http2/9\.9 a fault: what came"):
        door.h2spec(None)  # type: ignore[arg-type]
