"""A trace that is named is the load, or the evaluation ends at once: no other load passes for it, no hours are lost."""

import importlib
import multiprocessing
import sys

import numpy as np
import pytest

from benchmarks.evaluating import start_of, trace_of
from benchmarks.otas import load

SECONDS_OF_TRACE = ("mosel", "otas", "ipa", "forecast")


@pytest.fixture(autouse=True)
def nothing_simulated(monkeypatch):
    """A pool of processes is never asked for."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: pytest.fail("cells are simulated"))


@pytest.fixture
def told_about(monkeypatch, capsys, tmp_path):
    """Run an evaluation on a trace; what it said of it. Files that IPA needs beside are there, and are not reached."""
    for name in ("ipa_profiles.csv", "ipa_pipelines.csv", "ipa_timelines.csv.gz"):
        (tmp_path / name).touch()

    def run(evaluation, trace, *more):
        places = [] if evaluation == "forecast" else ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", [evaluation, "--trace", str(trace), *places, *more])
        assert importlib.import_module(f"benchmarks.{evaluation}.__main__").main() == 2
        return capsys.readouterr().err

    return run


def written(path, counts):
    path.write_text("requests\n" + "".join(f"{count}\n" for count in counts))
    return path


def is_one_line_about(trace, told):
    return told.startswith("trimtab: ") and told.count("\n") == 1 and trace.name in told


@pytest.mark.parametrize("evaluation", [*SECONDS_OF_TRACE, "modserve"])
def test_a_trace_that_is_not_there_is_an_error_and_no_other_load(evaluation, told_about, tmp_path):
    trace = tmp_path / "typo.csv"

    assert is_one_line_about(trace, told_about(evaluation, trace))


def test_a_trace_of_an_hour_has_none_of_the_recordings_seconds(told_about, tmp_path):
    trace = written(tmp_path / "hour.csv", [20] * 3600)

    for evaluation in ("mosel", "otas"):
        told = told_about(evaluation, trace, "--trace-start", "869160")
        assert is_one_line_about(trace, told)
        assert "out of 3600" in told
    told = told_about("ipa", trace)
    assert is_one_line_about(trace, told)
    assert "--trace-start" in told


def test_another_trace_is_begun_at_its_own_first_second(tmp_path):
    other = written(tmp_path / "other.csv", [1])

    assert start_of(None, None, 869_160) == 869_160
    assert start_of(None, other, 869_160) == 0
    assert start_of(7, other, 869_160) == 7
    assert trace_of(other, tmp_path / "ours.csv", "") == other
    assert trace_of(None, other, "") == other
    assert trace_of(None, tmp_path / "ours.csv", "it is made up") is None


def test_a_trace_that_is_silent_most_of_the_time_is_not_scaled_to_a_flood(told_about, tmp_path):
    trace = written(tmp_path / "silent.csv", [0] * 800 + [20] * 400)

    assert is_one_line_about(trace, told_about("otas", trace))
    assert np.quantile(load.bursty_rps(trace, 800, 20), 0.6) == pytest.approx(300)


@pytest.mark.parametrize("requests", [[10] * 100, [0] * 180])
def test_a_day_of_too_few_minutes_or_of_none_but_silent_ones_is_told_first(requests, told_about, tmp_path):
    trace = tmp_path / "minutes.csv"
    trace.write_text("minute,requests\n" + "".join(f"{at},{count}\n" for at, count in enumerate(requests)))

    assert is_one_line_about(trace, told_about("modserve", trace))


@pytest.mark.parametrize("counts", [[20] * 100, [5], np.random.default_rng(1).poisson(1.5, 600).tolist()])
def test_forecasts_are_not_judged_on_a_trace_without_whole_windows(counts, told_about, tmp_path):
    trace = written(tmp_path / "short.csv", counts)

    told = told_about("forecast", trace)
    assert is_one_line_about(trace, told)
    assert "windows" in told
