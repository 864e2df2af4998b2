"""Example pipelines: valid, with accuracies equal to the measured ones."""

import json
from pathlib import Path

import pytest

from trimtab_pipelines.documents import load_pipeline

EXAMPLES = sorted((Path(__file__).parents[2] / "pipelines").glob("*/pipeline.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_example_is_valid_and_its_weights_exist(path):
    pipeline = load_pipeline(path)
    local = [v.storage_uri for s in pipeline.spec.stages for v in s.variants if "://" not in v.storage_uri]

    assert pipeline.name == path.parent.name
    assert [uri for uri in local if not (path.parent / uri).is_file()] == []


def test_examples_exist():
    assert EXAMPLES


@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if (p.parent / "accuracy.json").exists()], ids=lambda p: p.parent.name
)
def test_example_accuracies_match_measurements(path):
    files = path.parent.glob("accuracy*.json")
    measured = {name: accuracy for file in files for name, accuracy in json.loads(file.read_text())["variants"].items()}
    declared = {v.name: v for stage in load_pipeline(path).spec.stages for v in stage.variants}

    assert declared.keys() == measured.keys()
    for name, variant in declared.items():
        evidence = variant.accuracy_evidence
        assert evidence.source == "Measured"
        assert (variant.accuracy, evidence.samples, evidence.low, evidence.high) == tuple(
            measured[name][field] for field in ("accuracy", "n", "low", "high")
        )
