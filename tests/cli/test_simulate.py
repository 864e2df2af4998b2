"""`trimtab simulate`: record, report and user errors."""

import json
from pathlib import Path

import pytest

from tests.adapter.test_prompts import PIPELINE, READ
from tests.cli.pipelines import echo_plan, write_echo_pipeline, write_plan
from tests.cli.test_command_line import a_profile_file
from trimtab.app import run
from trimtab.run_record import load
from trimtab_pipelines.documents import dump_yaml

Captured = pytest.CaptureFixture[str]


def test_simulation_is_recorded_and_reported(tmp_path: Path, capsys: Captured) -> None:
    pipeline = write_echo_pipeline(tmp_path)
    profiles = str(a_profile_file(tmp_path))
    arguments = ("simulate", str(pipeline), "--profiles", profiles, "--load", "constant:20", "--duration", "20")
    assert run((*arguments, "--fail", "first@10", "--out", str(tmp_path / "out"))) == 0

    outcome = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert outcome["name"] == "simulate"
    assert all(bar["holds"] for bar in outcome["bars"])
    assert outcome["figures"]["received_requests"] == pytest.approx(400, abs=80)
    recorded = load(tmp_path / "out" / "simulate")
    assert recorded.results is not None
    assert len(recorded.results.records) == outcome["figures"]["received_requests"]
    assert [fault.what for fault in recorded.faults] == ["replica of first lost"]
    assert "simulated" in (tmp_path / "out" / "simulate.html").read_text()[:500]


def test_fixed_plan_does_not_change(tmp_path: Path, capsys: Captured) -> None:
    pipeline, plan = write_echo_pipeline(tmp_path), write_plan(tmp_path / "plan.json", echo_plan())
    profiles = str(a_profile_file(tmp_path))
    arguments = ("simulate", str(pipeline), "--profiles", profiles, "--plan", str(plan), "--out", str(tmp_path / "out"))
    assert run((*arguments, "--load", "constant:5", "--duration", "5")) == 0

    assert json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]["plan_changes"] == 0


def test_simulated_latency_includes_prefill_of_text(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(PIPELINE))
    (tmp_path / "profile.yaml").write_text(dump_yaml(*READ.values()))
    arguments = [
        "simulate",
        str(tmp_path),
        "--profiles",
        str(tmp_path / "profile.yaml"),
        "--out",
        str(tmp_path / "out"),
    ]
    arguments += ["--load", "constant:2", "--duration", "20", "--images", "0"]
    medians = []
    for tokens in ("20", "120"):
        assert run([*arguments, "--text-tokens", tokens]) == 0
        figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
        assert figures["ok_requests"] == figures["received_requests"]
        medians.append(figures["latency_p50_seconds"])

    assert medians[1] == pytest.approx(medians[0] + 100 * 0.0005, abs=0.01)
