"""Five pipelines of IPA: figures of the paper, and full-size light variants served on this machine."""

from pathlib import Path

import pytest
import yaml

from tests.builders import a_plan
from tests.ipa import ACCURACY_OF_THE_PLOTS, BESIDE_THE_TABLES, FOLDER, STAGE_SECONDS, VARIANTS, WEIGHTS, ipa_pipeline
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_loadtester.clients import RestClient
from trimtab_loadtester.payloads.sources import payload_source
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.synthetic_inputs import parse_distributions

NAMES = sorted(STAGE_SECONDS)


@pytest.mark.parametrize("name", NAMES)
def test_slo_and_objective_match_the_paper(name):
    spec = ipa_pipeline(name).spec
    alpha, beta = WEIGHTS[name]

    assert spec.slo.latency_seconds == pytest.approx(sum(STAGE_SECONDS[name]), abs=0.011)  # the paper rounds the sum
    assert len(spec.ordered_stages) == len(STAGE_SECONDS[name])
    objective = spec.objective
    assert (objective.goal, objective.accuracy_metric) == ("Weighted", "Product")
    assert (objective.accuracy_weight, objective.cost_weight, objective.batch_weight) == (alpha, beta, 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_variants_match_the_paper(name):
    for stage in ipa_pipeline(name).spec.stages:
        assert stage.batch_sizes == (1, 2, 4, 8, 16, 32, 64)
        for variant in stage.variants:
            row = (VARIANTS | BESIDE_THE_TABLES)[variant.name]
            accuracy = ACCURACY_OF_THE_PLOTS.get(variant.name, row.accuracy)
            assert variant.resources.cpu == row.cores
            assert 100 * variant.accuracy == pytest.approx(accuracy, abs=0.006)
            assert variant.accuracy_evidence.source == "Published"


def test_every_variant_of_the_paper_exists():
    found = {v.name for name in NAMES for stage in ipa_pipeline(name).spec.stages for v in stage.variants}

    assert found == VARIANTS.keys() | BESIDE_THE_TABLES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_every_open_input_has_a_length_distribution(name):
    pipeline = ipa_pipeline(name)
    laws = parse_distributions(pipeline.metadata.annotations["trimtab.dev/payloads"], pipeline.spec.inputs)

    assert {tensor.name for tensor in pipeline.spec.inputs if -1 in tensor.shape} <= laws.keys()


PARAMETERS = {"timeout": 60_000_000, "binary_data_output": True}
"""The timeout is generous, since the machine may be busy."""


def light_pipeline(name: str, variants: tuple[str, ...], folder: Path) -> Path:
    """Write a pipeline with only these variants, one core a replica, for a machine of two cores."""
    document = yaml.safe_load((FOLDER / name / "pipeline.yaml").read_text())
    document["spec"]["budget"] = {"cores": "2"}
    for stage in document["spec"]["stages"]:
        stage["variants"] = [variant for variant in stage["variants"] if variant["name"] in variants]
        for variant in stage["variants"]:
            variant["resources"]["cpu"] = "1"
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "variants", "shapes"),
    [
        (
            "video",
            ("yolov5n", "resnet18"),
            {"count": (1,), "boxes": (1, 4), "confidence": (1,), "label": (1,), "logits": (1, 1000)},
        ),
        ("sum-qa", ("distilbart-1-1", "roberta-base"), {"summary": (1, 16), "start": (1,), "end": (1,), "score": (1,)}),
    ],
)
async def test_pipeline_is_served(tmp_path: Path, name, variants, shapes) -> None:
    path = light_pipeline(name, variants, tmp_path)
    pipeline = load_pipeline(path)
    async with Supervisor(Setup(path, tmp_path / "run", plan=a_plan(pipeline, batchSize=1))) as local:
        await local.ready()
        async with RestClient(f"127.0.0.1:{local.rest_port}", pipeline.name) as client:
            for index in range(2):
                inputs = payload_source(pipeline, seed=3).payload(index).inputs
                reply = await client.send(client.encode(inputs, (), PARAMETERS))
                assert reply.message is not None, reply.detail
                assert {tensor.name: tensor.shape for tensor in reply.message.outputs} == shapes
