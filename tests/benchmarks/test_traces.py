"""Traces of evaluations: an unusable trace ends the evaluation before anything is simulated."""

from multiprocessing.context import SpawnContext

import numpy as np
import pytest

from benchmarks.__main__ import main as run_benchmark
from benchmarks.papers.otas_queries import bursty_rps

SECONDS_OF_TRACE = ("mosel", "otas", "ipa", "forecast")


@pytest.fixture(autouse=True)
def nothing_simulated(monkeypatch):
    """Fail if cells are simulated."""
    monkeypatch.setattr(SpawnContext, "Process", lambda *_, **__: pytest.fail("cells are simulated"))


@pytest.fixture
def error_about(capsys, tmp_path):
    """Run an evaluation on a trace; returns its error output. IPA's other files exist and are not read."""
    for name in ("ipa_profiles.csv", "ipa_pipelines.csv", "ipa_timelines.csv.gz"):
        (tmp_path / name).touch()

    def run(evaluation, trace, *more):
        folders = [] if evaluation == "forecast" else ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
        name = evaluation if evaluation == "forecast" else f"reproduce-{evaluation}"
        assert run_benchmark([name, "--trace", str(trace), *folders, *more]) == 2
        return capsys.readouterr().err

    return run


def written(path, counts):
    path.write_text("requests\n" + "".join(f"{count}\n" for count in counts))
    return path


def is_one_line_about(trace, message):
    return message.startswith("trimtab: ") and message.count("\n") == 1 and trace.name in message


@pytest.mark.parametrize("evaluation", [*SECONDS_OF_TRACE, "modserve"])
def test_missing_trace_is_an_error(evaluation, error_about, tmp_path):
    trace = tmp_path / "typo.csv"

    assert is_one_line_about(trace, error_about(evaluation, trace))


def test_trace_start_beyond_the_trace_is_an_error(error_about, tmp_path):
    trace = written(tmp_path / "hour.csv", [20] * 3600)

    for evaluation in ("mosel", "otas"):
        message = error_about(evaluation, trace, "--trace-start", "869160")
        assert is_one_line_about(trace, message)
        assert "out of 3600" in message
    message = error_about("ipa", trace)
    assert is_one_line_about(trace, message)
    assert "--trace-start" in message


def test_mostly_silent_trace_is_not_scaled_up(error_about, tmp_path):
    trace = written(tmp_path / "silent.csv", [0] * 800 + [20] * 400)

    assert is_one_line_about(trace, error_about("otas", trace))
    assert np.quantile(bursty_rps(trace, 800, 20), 0.6) == pytest.approx(300)


@pytest.mark.parametrize("requests", [[10] * 100, [0] * 180])
def test_too_short_or_silent_day_is_an_error(requests, error_about, tmp_path):
    trace = tmp_path / "minutes.csv"
    trace.write_text("minute,requests\n" + "".join(f"{at},{count}\n" for at, count in enumerate(requests)))

    assert is_one_line_about(trace, error_about("modserve", trace))


@pytest.mark.parametrize("counts", [[20] * 100, [5], np.random.default_rng(1).poisson(1.5, 600).tolist()])
def test_trace_without_full_windows_is_not_forecast(counts, error_about, tmp_path):
    trace = written(tmp_path / "short.csv", counts)

    message = error_about("forecast", trace)
    assert is_one_line_about(trace, message)
    assert "windows" in message
