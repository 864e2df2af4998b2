"""Mistakes of a first day: each is reported in one line, with exit code 2, before anything starts."""

import os
import re
import socket
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import a_pipeline_document, a_point_profile, a_profile
from tests.cli.test_command_line import Captured, said
from trimtab.app import run
from trimtab.local import profile_cache
from trimtab.preflight import remarks
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_profiler.identity import model_identity, this_machine

Change = Callable[[dict[str, Any]], object]
MODULE = """import torch


class Net(torch.nn.Module):
    inputs = {"x": ("FP32", (4,))}
    outputs = {"y": ("FP32", (4,))}

    def __init__(self, width: int = 4):
        super().__init__()

    def forward(self, x):
        return {"y": x}
"""
NO_DIGEST = "sha256:" + 64 * "0"


def a_file(folder: Path, change: Change = lambda _: None, stages: int = 1) -> Path:
    document = a_pipeline_document(stages, budget={"cores": "8", "gpus": 1})
    change(document["spec"])
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def stage(**fields: Any) -> Change:
    return lambda spec: spec["stages"][0].update(fields)


def variant(number: int = 0, **fields: Any) -> Change:
    return lambda spec: spec["stages"][number]["variants"][0].update(fields)


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a family of the user's own, on the path of all processes; no profile is cached."""
    (folder := tmp_path / "code" / "acme_first_day").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (module := folder / "models.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder.parent), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv(profile_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return module


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (stage(batch_sizes=[1, 2]), "spec.stages.0.batch_sizes: unknown field; write batchSizes"),
        (variant(memroy="1Gi"), "spec.stages.0.variants.0.memroy: unknown field; remove it or correct its spelling"),
        (variant(accuracy=94), "spec.stages.0.variants.0.accuracy: Input should be less than or equal to 1 (got '94')"),
        (stage(outputs=[{"name": "y", "datatype": "int64"}]), "'FP64' or 'BYTES' (got 'int64')"),
        (lambda spec: spec.pop("budget"), "spec.budget: Field required"),
        (variant(family="hf/Nope"), "unknown family 'hf/Nope'"),
        (variant(family="acme_nowhere.models:Net"), "no module 'acme_nowhere'"),
        (variant(storageUri="nowhere.safetensors"), "nowhere.safetensors does not exist"),
        (variant(storageUri="pipeline.yaml", digest=NO_DIGEST), f"but {NO_DIGEST} is required"),
        (variant(family="", storageUri="", container={"image": "i"}), "an image only runs in a cluster"),
        (variant(family="", storageUri=""), "give storageUri and family or implementation"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "profile"])
def test_mistake_in_a_pipeline_is_one_line(
    acme: Path, tmp_path: Path, capsys: Captured, change: Change, complaint: str, verb: str
) -> None:
    load = ("--load", "5") if verb == "plan" else ()
    error = said(capsys, 2, verb, str(a_file(tmp_path, change)), *load)
    assert error.rstrip().endswith(complaint) or complaint in error.partition("; there are: ")[0]
    assert "at least 1 item" not in error
    assert "pydantic" not in error


def test_unreachable_hub_is_named_before_anything_starts(
    acme: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE", str(tmp_path / "weights"))
    change = variant(storageUri="hf://owner/name@0123456789abcdef0123456789abcdef01234567/model.safetensors")
    error = said(capsys, 2, "up", str(a_file(tmp_path, change)))

    assert f"127.0.0.1:{port} cannot be reached (Connection refused); set HF_ENDPOINT to a mirror" in error


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("acme-nowhere>=2  # mine", "requires acme-nowhere>=2, which is not installed; run: "),
        ("numpy<1", f"requires numpy<1, not {version('numpy')}, which is installed; run: "),
        ("numpy=1", "numpy=1: "),
    ],
)
def test_missing_package_is_named_with_its_command(tmp_path: Path, capsys: Captured, line: str, complaint: str) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"# mine\n-r other.txt\nnumpy>=1\nacme-nowhere; python_version < '3'\n{line}\n")
    error = said(capsys, 2, "profile", str(a_file(tmp_path)))
    assert f"{requirements}" in error
    assert complaint in error
    assert "run: " not in complaint or error.rstrip().endswith(f"-m pip install -r {requirements}")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (variant(1, family="acme_first_day.models:Nat"), "acme_first_day.models has no 'Nat'; it has: Net"),
        (variant(1, family="acme_first_day.models:Net", parameters={"widht": 4}), "there are: width"),
    ],
)
@pytest.mark.endurance
def test_mistake_in_a_model_is_one_line_before_any_measurement(
    acme: Path, tmp_path: Path, capsys: Captured, change: Change, complaint: str
) -> None:
    assert complaint in said(capsys, 2, "plan", str(a_file(tmp_path, change, stages=2)), "--load", "5")


def test_requested_gpu_is_never_served_on_the_cpu(acme: Path, tmp_path: Path, capsys: Captured) -> None:
    path = a_file(tmp_path, variant(family="acme_first_day.models:Net", resources={"gpu": 1}))
    assert "torch finds no GPU here" in said(capsys, 2, "plan", str(path), "--load", "5")


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (stage(batchSizes=[1, 100]), "batchSizes 100 are above maxBatchSize 64 and are not used"),
        (variant(storageUri="big.bin", resources={"memory": "1Mi"}), "2 MiB do not fit into resources.memory, 1 MiB"),
        (variant(parameters={"folder": "models/tiny"}), "write ./models/tiny for a path relative to the pipeline"),
        (
            variant(accuracyEvidence={"source": "Measured", "modelDigest": NO_DIGEST}),
            "its accuracy was measured with other weights, parameters or code; run trimtab evaluate again",
        ),
        (lambda _: None, ""),
    ],
)
def test_unexpected_but_valid_setting_is_remarked(tmp_path: Path, change: Change, remark: str) -> None:
    (tmp_path / "big.bin").write_bytes(bytes(2 * 2**20))
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    path = a_file(tmp_path, change)
    found = list(remarks(path, load_pipeline(path)))
    assert len(found) == bool(remark)
    assert remark in "".join(found)


@pytest.mark.parametrize("option", ["--rest-port", "--grpc-port", "--admin-port"])
def test_port_in_use_is_named_by_its_option(tmp_path: Path, capsys: Captured, option: str) -> None:
    ports = dict.fromkeys(("--rest-port", "--grpc-port", "--admin-port"), "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[option] = str(taken.getsockname()[1])
        words = [word for pair in ports.items() for word in pair]
        error = said(capsys, 2, "up", str(a_file(tmp_path)), *words)
    assert f"{option} {ports[option]}: Address already in use; give another port, or 0 for a free one" in error


def test_dead_address_is_the_reason_of_failed_requests(tmp_path: Path, capsys: Captured) -> None:
    load = ("--load", "constant:5", "--duration", "1", "--address", "127.0.0.1:9")
    assert run(["loadtest", str(a_file(tmp_path)), *load]) == 1
    assert re.search(r"^! \d+ requests failed: .*127\.0\.0\.1:9.*[Cc]onnect", capsys.readouterr().out, re.MULTILINE)


def test_stage_that_served_no_rows_is_named() -> None:
    facts = RunFacts("sample", "5", 1.0, 1.0, ("first", "second"), 0.0)
    record = Record(0.0, 0.0, 0.1, RequestOutcome.OK, "200", visits={"first": StageVisit("small", batch_size=2)})
    assert Results.of(facts, [record]).idle_stages() == ["second"]
    assert Results.of(facts, []).idle_stages() == []


def a_profile_of(path: Path, **fields: Any) -> ModelProfile:
    """A profile of the pipeline as it is now, on this machine."""
    (first,) = load_pipeline(path).spec.stages
    models = {one.name: model_identity(one, path.parent) for one in first.variants}
    profile = a_profile(first.name, [a_point_profile()])
    spec = {"models": models, "hardware": this_machine(), **fields}
    return profile.with_spec(**spec)


def test_profile_of_other_code_or_files_is_not_used(acme: Path, tmp_path: Path) -> None:
    (data := tmp_path / "data.bin").write_text("one")
    path = a_file(tmp_path, variant(family="acme_first_day.models:Net", parameters={"file": "./data.bin"}))
    profiles = {"stage-0": a_profile_of(path)}
    assert not profile_cache.why_unfit(profiles, path, load_pipeline(path))
    acme.write_text(MODULE + "\nimport time\n")
    assert profile_cache.why_unfit(profiles, path, load_pipeline(path)).endswith("measured with other code")
    acme.write_text(MODULE)
    data.write_text("two")
    assert profile_cache.why_unfit(profiles, path, load_pipeline(path)).endswith("other parameters (file)")


def test_profile_of_a_busy_machine_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = a_file(tmp_path)
    busy = {"stage-0": a_profile_of(path, busy_share=0.6)}
    for now, reason in ((0.5, ""), (0.1, "it was measured while other processes used 60% of the cores")):
        monkeypatch.setattr(profile_cache, "busy_now", lambda now=now: now)
        assert profile_cache.why_unfit(busy, path, load_pipeline(path)) == reason
