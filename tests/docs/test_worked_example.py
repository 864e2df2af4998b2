"""Complete examples of pages below docs/develop: their files and commands, run in an empty folder."""

import json
import os
import re
import site
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab_pipelines.documents import load_pipeline

PAGES = Path(__file__).parents[2] / "docs" / "develop"
FILES = re.compile(r"`([\w/.]+)`[^`]*:\n```(?:python|text|toml|yaml|dockerfile)\n(.*?)```", re.DOTALL)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a virtual environment with Trimtab installed, without an index for pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (installed,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (installed / "base.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
    programs = tmp_path / "venv" / "bin"
    for name in ("pip", "trimtab"):
        (programs / name).write_text(f'#!/bin/sh\nexec {programs / "python"} -P -m {name} "$@"\n')
        (programs / name).chmod(0o755)
    of_pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "TRIMTAB_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **of_pip, **own}


def run_example(page: str, folder: Path, machine: dict[str, str]) -> str:
    """Write the page's files, run its commands, and return what they print."""
    example = (PAGES / page).read_text().split("## A complete example\n")[1].split("\n## ")[0]
    for name, text in FILES.findall(example):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    commands = re.findall(r"```sh\n(.*?)```", example, re.DOTALL)[0]
    elsewhere = "--rest-port 0 --grpc-port 0 --admin-port 0"  # 8080 may be another's here
    done = subprocess.run(
        ["sh", "-e", "-c", commands.replace("trimtab up .", f"trimtab up . {elsewhere}")],
        cwd=folder,
        env=machine,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_example_runs_as_documented(tmp_path: Path, machine: dict[str, str]) -> None:
    folder = tmp_path / "example"

    output = run_example("bring-your-own-model.md", folder, machine)

    variants = {variant.name: variant for variant in load_pipeline(folder).spec.stages[0].variants}
    assert variants["large"].accuracy > 0.95
    assert 0.3 < variants["small"].accuracy < variants["large"].accuracy
    assert {(v.accuracy_evidence.source, v.accuracy_evidence.samples) for v in variants.values()} == {("Measured", 500)}
    (result,) = (json.loads(line) for line in output.splitlines() if line.startswith('{"name":"evaluate"'))
    assert result["figures"]["samples"] == 500
    planned = re.search(r"^read +large .* (0\.\d+) measured \(n 500, ", output, re.MULTILINE)
    assert planned is not None, output
    assert float(planned[1]) == variants["large"].accuracy
    assert (folder / "report.html").exists()
    assert re.search(r"^measured accuracy +0\.9", output, re.MULTILINE), output


@pytest.mark.conformance
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["scikit-learn.md", "hugging-face.md"])
def test_saved_models_are_served_and_adapted(page: str, tmp_path: Path, machine: dict[str, str]) -> None:
    folder = tmp_path / "example"

    output = run_example(page, folder, machine)

    light, heavy = load_pipeline(folder).spec.stages[0].variants
    assert len((folder / "pipeline.yaml").read_text().splitlines()) <= 12
    assert (light.accuracy_evidence.source, heavy.accuracy_evidence.samples) == ("Measured", 500)
    assert 0.5 < light.accuracy < 0.9 < heavy.accuracy
    assert re.search(r"^plan changes +[1-9]", output, re.MULTILINE), output
    assert re.search(r"^requests received .* 0 failed", output, re.MULTILINE), output
    assert re.search(r"^measured accuracy +0\.[6-9]", output, re.MULTILINE), output
