"""Five pipelines of IPA: figures of the paper, with accuracies marked as not measured."""

import pytest

from tests.ipa import ACCURACY_OF_THE_PLOTS, BESIDE_THE_TABLES, STAGE_SECONDS, VARIANTS, WEIGHTS, ipa_pipeline
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
