"""Relative weight paths of shipped pipelines, at their location in the model server's image."""

import re
from pathlib import Path

import pytest

from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import resolve_uri

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = re.findall(r"^COPY (\S+) /opt/trimtab/pipelines/(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
FILES = [file for folder, _ in SHIPPED for file in sorted((ROOT / folder).glob("*.yaml"))]


def test_image_contains_pipelines_with_local_weights():
    beside = {
        file.parent.name for file in ROOT.glob("pipelines/*/*.yaml") if "storageUri: weights/" in file.read_text()
    }
    let_in = {line.removeprefix("!pipelines/") for line in (ROOT / ".dockerignore").read_text().splitlines()}

    assert {folder.rpartition("/")[2] for folder, _ in SHIPPED} == {name for _, name in SHIPPED} == beside
    assert beside >= {"digits", "digits-av", "lmm-digits"}
    assert beside <= let_in


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_pipeline_finds_its_weights_by_name(file: Path, tmp_path: Path):
    for folder, name in SHIPPED:
        (tmp_path / name).symlink_to(ROOT / folder)
    pipeline = load_pipeline(file)

    for variant in (variant for stage in pipeline.spec.stages for variant in stage.variants):
        found = resolve_uri(variant.storage_uri, tmp_path / pipeline.name)
        assert "://" in found or Path(found).exists(), f"{variant.storage_uri} is not at {found}"
