"""Example pipelines: valid, with the measured accuracies, and with weights that the model server's image contains."""

import re
from pathlib import Path

import pytest
import yaml

from trimtab_pipelines.documents import load_pipeline, parse
from trimtab_pipelines.model_spec import resolve_uri
from trimtab_pipelines.spec import InferencePipeline

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "pipelines").glob("*/pipeline.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_example_is_valid_and_its_weights_exist(path):
    pipeline = load_pipeline(path)
    local = [v.storage_uri for s in pipeline.spec.stages for v in s.variants if "://" not in v.storage_uri]

    assert pipeline.name == path.parent.name
    assert [uri for uri in local if not (path.parent / uri).exists()] == []


SHIPPED = re.findall(r"^COPY (\S+) /opt/trimtab/pipelines/(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
FILES = [file for folder, _ in SHIPPED for file in sorted((ROOT / folder).glob("*.yaml"))]


def test_escalations_stay_valid_with_dedicated_replicas():
    """A user who changes the placement keeps the evidence of what one replica hosted."""
    document = yaml.safe_load((ROOT / "pipelines" / "digits" / "pipeline.yaml").read_text())
    for stage in document["spec"]["stages"]:
        stage["variantPlacement"] = "Dedicated"
    pipeline = parse(InferencePipeline, document, "digits")

    assert any(point.escalations for v in pipeline.spec.stages[1].variants for point in v.points)
    assert pipeline.spec.policy_name == "EarliestDeadlineFirst"


def test_image_contains_pipelines_with_local_weights():
    beside = {
        file.parent.name for file in ROOT.glob("pipelines/*/*.yaml") if "storageUri: weights/" in file.read_text()
    }
    let_in = {line.removeprefix("!pipelines/") for line in (ROOT / ".dockerignore").read_text().splitlines()}

    assert {folder.rpartition("/")[2] for folder, _ in SHIPPED} == {name for _, name in SHIPPED} == beside
    assert beside >= {"digits", "digits-av", "lmm-digits", "spoken-sums"}
    assert beside <= let_in


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_pipeline_finds_its_weights_by_name(file: Path, tmp_path: Path):
    for folder, name in SHIPPED:
        (tmp_path / name).symlink_to(ROOT / folder)
    pipeline = load_pipeline(file)

    for variant in (variant for stage in pipeline.spec.stages for variant in stage.variants):
        found = resolve_uri(variant.storage_uri, tmp_path / pipeline.name)
        assert "://" in found or Path(found).exists(), f"{variant.storage_uri} is not at {found}"
