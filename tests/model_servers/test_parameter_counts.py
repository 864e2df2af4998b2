"""Parameter counts of IPA's variants equal the paper's tables."""

import pytest
import torch
from torchvision import models

from tests.ipa import BESIDE_THE_TABLES, FOLDER, STAGE_SECONDS, VARIANTS, ipa_pipeline
from trimtab_model_servers.families.detector import SIZES, Detector
from trimtab_model_servers.families.pretrained import architecture_of, construct
from trimtab_pipelines.model_spec import ModelSpec, model_spec

ROUNDING_MILLIONS = 0.1  # the tables cut off as often as they round: 82.97 is printed as 82.9, 60.19 as 60.2


def spec_of(variant: str) -> ModelSpec:
    for name in STAGE_SECONDS:
        pipeline = ipa_pipeline(name)
        for stage in pipeline.spec.stages:
            for found in stage.variants:
                if found.name == variant:
                    return model_spec(pipeline, pipeline_folder=FOLDER / name, stage=stage, variant=found, cores=1)
    raise KeyError(variant)


def build_without_memory(spec: ModelSpec):
    group, _, name = spec.family.partition("/")
    with torch.device("meta"):
        if group == "detector":
            return Detector(SIZES[name])
        if group == "torchvision":
            return getattr(models, name)(weights=None)
        labels = {"num_labels": spec.parameters["labels"]} if "labels" in spec.parameters else {}
        return construct(architecture_of(spec), **labels)


@pytest.mark.parametrize("variant", [*VARIANTS, *BESIDE_THE_TABLES])
def test_parameter_count_equals_the_paper(variant):
    model = build_without_memory(spec_of(variant))
    millions = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) / 1e6

    assert millions == pytest.approx((VARIANTS | BESIDE_THE_TABLES)[variant].millions, abs=ROUNDING_MILLIONS)
