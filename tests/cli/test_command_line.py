"""Commands: user errors end with code 2 and one line that names the cause, and nothing is started; simulations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.adapter.test_layouts import planned
from tests.adapter.test_prompts import PIPELINE, READ
from tests.builders import a_pipeline, a_profile, a_stage, a_variant, point_profiles
from tests.cli.pipelines import echo_pipeline, echo_plan, echo_profiles, write_echo_pipeline, write_plan
from trimtab import run_record
from trimtab.app import run
from trimtab.commands.loadtest import loadtest_result
from trimtab.demo_load import changing_load
from trimtab.local.rollout import memory_bytes_per_replica, variants_to_load
from trimtab.local.supervisor import MARK, MARK_FILE, OWN_FOLDERS, create_own_folder, remove_own_folder
from trimtab.plan_view import explanation_lines
from trimtab.preflight import require_installed
from trimtab.run_folder import LOCK_FILE, RunFolder
from trimtab.run_record import FACTS_FILE
from trimtab_pipelines.accuracy_evidence import AGREEMENT
from trimtab_pipelines.documents import DocumentError, dump_yaml, load_plan
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.request_outcome import RequestOutcome

Captured = pytest.CaptureFixture[str]


def said(capsys: Captured, code: int, *arguments: str) -> str:
    """Run a command that must fail; return its one line."""
    assert run(arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("trimtab: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


def a_profile_file(folder: Path) -> Path:
    path = folder / "measured.yaml"
    path.write_text(dump_yaml(*echo_profiles().values()))
    return path


def test_run_keeps_files_that_are_not_of_a_run(tmp_path: Path, capsys: Captured) -> None:
    path, mine = write_echo_pipeline(tmp_path / "echo"), tmp_path / "mine"
    weights, other = mine / "models" / "w.bin", mine / "pipeline.yaml"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    other.write_text("of another pipeline")
    before = sorted(mine.rglob("*"))
    plan, ports = write_plan(tmp_path / "given.json", echo_plan()), ("--rest-port", "0", "--grpc-port", "0")
    arguments = ("up", str(path), "--plan", str(plan), "--folder", str(mine), *ports, "--admin-port", "0")
    assert "holds files that are not a run's" in said(capsys, 2, *arguments, "--duration", "0.1")
    assert sorted(mine.rglob("*")) == before
    assert weights.read_bytes() == b"weights"
    assert other.read_text() == "of another pipeline"


def test_run_reuses_an_empty_or_earlier_run_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with RunFolder(tmp_path) as taken:
            assert taken == tmp_path
            for name in OWN_FOLDERS:
                create_own_folder(tmp_path / name)
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / FACTS_FILE).write_text('{"title": "a run", "faults": [], "ready_seconds": 1.0}')
    with RunFolder(tmp_path):
        assert (tmp_path / LOCK_FILE).read_bytes().startswith(MARK)


@pytest.mark.parametrize("planted", ["lock", "link", "facts", "folder", "linked folder"])
def test_run_takes_no_folder_that_only_looks_like_a_run(tmp_path: Path, planted: str) -> None:
    mine, precious = tmp_path / "mine", tmp_path / "precious"
    weights = mine / ("models" if "folder" in planted else "data") / "w.bin"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    precious.write_bytes(MARK + b"precious")
    match planted:
        case "lock":
            (mine / LOCK_FILE).write_text("of an editor")
        case "link":
            (mine / LOCK_FILE).symlink_to(precious)
        case "facts":
            (mine / FACTS_FILE).write_text("{}")
        case "folder":
            (mine / LOCK_FILE).write_bytes(MARK)
        case "linked folder":
            (mine / LOCK_FILE).write_bytes(MARK)
            weights.parent.rename(tmp_path / "elsewhere")
            (tmp_path / "elsewhere" / MARK_FILE).write_bytes(MARK)
            weights.parent.symlink_to(tmp_path / "elsewhere")
    before = sorted(mine.rglob("*"))
    with pytest.raises(DocumentError, match="holds files that are not a run's"), RunFolder(mine):
        pass
    assert sorted(mine.rglob("*")) == before
    assert weights.read_bytes() == b"weights"
    assert precious.read_bytes() == MARK + b"precious"


def test_only_folders_that_a_run_created_are_removed(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    other.mkdir()
    for folder in (own, other):
        create_own_folder(folder)
        (folder / "file").touch()
        remove_own_folder(folder)
    assert (own.exists(), (other / "file").exists()) == (False, True)


def test_plan_of_another_pipeline_is_rejected(tmp_path: Path, capsys: Captured) -> None:
    path = write_echo_pipeline(tmp_path)
    plan = write_plan(tmp_path / "plan.json", echo_plan(replicas=3))
    assert "the plan requests 3 cores and 0 GPUs, but the budget is 2 cores" in said(
        capsys, 2, "up", str(path), "--plan", str(plan)
    )
    plan.write_text(plan.read_text().replace('"variant": "fast"', '"variant": "huge"', 1))
    error = said(capsys, 2, "up", str(path), "--plan", str(plan))
    assert "stage first has no variant 'huge'; it has: fast, slow" in error


def test_status_without_a_router_fails(capsys: Captured) -> None:
    assert "http://127.0.0.1:1/trimtab/v1/state: ClientConnectorError" in said(capsys, 1, "status", "--port", "1")


def test_plan_selects_variants_for_the_load(tmp_path: Path, capsys: Captured) -> None:
    """A light load gets the accurate variants, a heavy one the fast ones; the file can be given to `up --plan`."""
    pipeline, profiles = str(write_echo_pipeline(tmp_path)), str(a_profile_file(tmp_path))
    for load, variant in (("1", "slow"), ("300", "fast")):
        out = tmp_path / f"{load}.json"
        assert run(["plan", pipeline, "--load", load, "--profiles", profiles, "-o", str(out)]) == 0
        assert {stage.variant for stage in load_plan(out).spec.stages} == {variant}
        assert f"first {variant} " in " ".join(capsys.readouterr().out.split())


def test_infeasible_plan_exits_with_1(tmp_path: Path, capsys: Captured) -> None:
    path, profiles = write_echo_pipeline(tmp_path), a_profile_file(tmp_path)
    for verb in ("plan", "explain"):
        assert run([verb, str(path), "--load", "1e5", "--profiles", str(profiles)]) == 1
        output = capsys.readouterr().out
        assert "not feasible: " in output
        assert "binding constraint" not in output


@pytest.mark.parametrize(
    ("counts", "least_within_slo", "holds"),
    [
        ({"ok": 9, "late": 1}, 0.0, True),
        ({"ok": 9, "late": 1}, 0.95, False),
        ({"failed": 10}, 0.0, False),
        ({"refused": 10}, 0.0, False),
        ({"ok": 9, "failed": 1}, 0.0, False),
        ({"ok": 9, "dropped": 1}, 0.9, True),
    ],
)
def test_loadtest_result_holds_if_thresholds_hold(counts: dict[str, int], least_within_slo: float, holds: bool) -> None:  # noqa: FBT001
    summary: dict[str, float] = {**dict.fromkeys((end.word for end in RequestOutcome), 0), **counts, "received": 10}
    summary["slo_fraction"] = counts.get("ok", 0) / 10
    assert loadtest_result(summary, least_within_slo).holds is holds


def test_loadtest_without_responses_fails(tmp_path: Path, capsys: Captured) -> None:
    arguments = ["loadtest", str(write_echo_pipeline(tmp_path)), "--address", "127.0.0.1:9"]
    assert run([*arguments, "--load", "constant:20", "--duration", "1"]) == 1
    assert '"ok":0' in capsys.readouterr().out


def test_changing_load_makes_every_stage_change() -> None:
    demand = changing_load(echo_pipeline(), echo_profiles(), cores=16)
    assert demand.high_rps >= 8 * demand.low_rps
    assert 100 < demand.high_rps < 2 * 2 * 500
    assert demand.spec().startswith("generated:low=")


def test_all_variants_are_loaded_if_memory_allows() -> None:
    pipeline = echo_pipeline()
    stage, mebibyte = pipeline.spec.stages[0], 2**20
    assert variants_to_load(stage, "slow", 128 * mebibyte) == ("fast", "slow")
    assert variants_to_load(stage, "slow", 100 * mebibyte) == ("slow",)
    assert memory_bytes_per_replica(pipeline, 2.0, 1000) == pytest.approx(0.6 * 1000 / 4)


def test_missing_package_error_names_the_install_command() -> None:
    with pytest.raises(StartError, match=r"model servers need no_such_package: pip install '\.\[all\]' in a clone"):
        require_installed(("sys", "no_such_package"))


def test_explain_prints_sensitivity_and_alternatives(tmp_path: Path, capsys: Captured) -> None:
    pipeline, profiles = str(write_echo_pipeline(tmp_path)), str(a_profile_file(tmp_path))
    what_if = ["--what-if", "load=300/20", "--what-if", "budget=x2"]
    assert run(["explain", pipeline, "--load", "10", "--profiles", profiles, *what_if]) == 0
    said_ = " ".join(capsys.readouterr().out.split())

    assert "solver: Exact, proven optimal" in said_
    assert "1 core less" in said_
    assert "load=300 0.6400 (-0.1700)" in said_
    assert "objective: 10 × accuracy - 0.5 × cores - 1e-06 × the sum of the batch sizes; higher is better" in said_
    assert "budget=x2 " in said_


def test_explain_prints_operating_points_and_evidence(tmp_path: Path, capsys: Captured) -> None:
    """Three points: the planned one, a faster fallback, and a dominated one."""
    evidence = {"source": "Measured", "low": 0.88, "high": 0.92}
    points = [
        {"name": "full", "accuracy": 0.9, "accuracyEvidence": evidence},
        {"name": "less", "accuracy": 0.8, "accuracyEvidence": {"source": "Agreement"}, "modalities": ["x"]},
        {"name": "worse", "accuracy": 0.7, "modalities": ["x"]},
    ]
    settings = {"schedulingPolicy": "SlackFit", "objective": {"accuracyBasis": "LowerBound"}}
    pipeline = a_pipeline([a_stage(variants=[a_variant(operatingPoints=points)])], **settings)
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(pipeline))
    measured = point_profiles({"full": (0.02, 0.002), "less": (0.005, 0.002), "worse": (0.006, 0.002)})
    profiles = tmp_path / "profile.yaml"
    profiles.write_text(dump_yaml(a_profile("first", measured)))

    assert run(["explain", str(tmp_path), "--load", "10", "--profiles", str(profiles)]) == 0
    output = " ".join(capsys.readouterr().out.split())

    assert "operating points, preferred first" in output
    assert "first full (planned) 0.8800" in output
    assert f"first less 0.8000 {AGREEMENT} 7.0 ms" in output
    assert "reads x" in output
    assert "accuracies: lower bounds of 95 % intervals" in output
    assert "excluded: first: small/worse" in output


def test_explain_uses_the_load_of_a_plan(tmp_path: Path, capsys: Captured) -> None:
    pipeline, profiles = str(write_echo_pipeline(tmp_path)), str(a_profile_file(tmp_path))
    plan = tmp_path / "plan.json"
    assert run(["plan", pipeline, "--load", "7", "--profiles", profiles, "-o", str(plan)]) == 0
    assert run(["explain", pipeline, "--plan", str(plan), "--profiles", profiles]) == 0
    assert "sample at 7 requests/s" in capsys.readouterr().out


def test_explain_figures_are_consistent(tmp_path: Path, capsys: Captured) -> None:
    pipeline, profiles = str(write_echo_pipeline(tmp_path)), str(a_profile_file(tmp_path))
    asked = ["--load", "20", "--profiles", profiles, "--what-if", "load=20"]
    assert run(["explain", pipeline, *asked]) == 0
    output = capsys.readouterr().out
    (stages,) = re.findall(r"^first +slow +(\d+) .*\n^second +slow +(\d+) ", output, re.MULTILINE)
    (latency,) = re.findall(r"^expected: .* latency (\S+) ms", output, re.MULTILINE)
    rows = re.findall(r"^(?:this plan|load=20) .* (\S+) ms .*$", output, re.MULTILINE)
    assert rows == [latency] * 3
    assert int(stages[0]) > 1  # where latency is free, batches are larger than the load asks for
    assert output.count(f"first: slow ×1 batch {stages[0]}; second: slow ×1 batch {stages[1]}") == 2


def test_plan_explains_encoder_placement() -> None:
    none, many = explanation_lines(planned(100, 0.0)), explanation_lines(planned(40, 8.0))

    assert any(line.startswith("image encoding: colocated; disaggregated (encode small ×1") for line in none)
    assert any(line.startswith("image encoding: disaggregated; colocated") for line in many)


def simulated(folder: Path, capsys: Captured, *options: str) -> dict[str, Any]:
    """Simulate the echo pipeline; return the result line."""
    arguments = ["simulate", str(write_echo_pipeline(folder)), "--profiles", str(a_profile_file(folder))]
    assert run([*arguments, "--out", str(folder / "out"), *options]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_simulation_is_recorded_and_reported(tmp_path: Path, capsys: Captured) -> None:
    outcome = simulated(tmp_path, capsys, "--load", "constant:20", "--duration", "20", "--fail", "first@10")

    assert outcome["name"] == "simulate"
    assert all(bar["holds"] for bar in outcome["bars"])
    assert outcome["figures"]["received_requests"] == pytest.approx(400, abs=80)
    recorded = run_record.load(tmp_path / "out" / "simulate")
    assert recorded.results is not None
    assert len(recorded.results.records) == outcome["figures"]["received_requests"]
    assert [fault.what for fault in recorded.faults] == ["replica of first lost"]
    assert "simulated" in (tmp_path / "out" / "simulate.html").read_text()[:500]


def test_fixed_plan_does_not_change(tmp_path: Path, capsys: Captured) -> None:
    plan = write_plan(tmp_path / "plan.json", echo_plan())
    outcome = simulated(tmp_path, capsys, "--plan", str(plan), "--load", "constant:5", "--duration", "5")

    assert outcome["figures"]["plan_changes"] == 0


def test_simulated_latency_includes_prefill_of_text(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(PIPELINE))
    (tmp_path / "profile.yaml").write_text(dump_yaml(*READ.values()))
    arguments = ["simulate", str(tmp_path), "--profiles", str(tmp_path / "profile.yaml")]
    arguments += ["--out", str(tmp_path / "out"), "--load", "constant:2", "--duration", "20", "--images", "0"]
    medians = []
    for tokens in ("20", "120"):
        assert run([*arguments, "--text-tokens", tokens]) == 0
        figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
        assert figures["ok_requests"] == figures["received_requests"]
        medians.append(figures["latency_p50_seconds"])

    assert medians[1] == pytest.approx(medians[0] + 100 * 0.0005, abs=0.01)
