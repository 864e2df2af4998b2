"""Parameter counts of IPA's variants and of multimodal models equal those of the papers."""

import pytest
import torch
from torch import nn
from torchvision import models

from tests.ipa import BESIDE_THE_TABLES, FOLDER, STAGE_SECONDS, VARIANTS, ipa_pipeline
from trimtab_model_servers.families import av_hubert, self_mm, tbn, tvlt, vilt
from trimtab_model_servers.families.detector import SIZES, Detector
from trimtab_model_servers.families.pretrained import architecture_of, construct
from trimtab_model_servers.families.tbn import BnInception
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
    published = (VARIANTS | BESIDE_THE_TABLES)[variant].millions
    assert millions(build_without_memory(spec_of(variant))) == pytest.approx(published, abs=ROUNDING_MILLIONS)


def millions(module):
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad) / 1e6


@pytest.mark.parametrize(
    ("construct", "expected"),
    [
        (lambda: vilt.Vilt(vilt.ViltParameters()).model, 111.6),
        (lambda: tvlt.Tvlt(tvlt.TvltParameters()), 87.3),
        (lambda: tbn.Tbn(tbn.TbnParameters()), 32.64),
        (lambda: BnInception(3), 10.27),
        (lambda: self_mm.SelfMm(self_mm.SelfMmParameters()).bert, 109.48),
        (lambda: without_head(av_hubert.AvHubert("base", av_hubert.AvHubertParameters())), 102.6),
        (lambda: without_head(av_hubert.AvHubert("large", av_hubert.AvHubertParameters())), 324.6),
    ],
    ids=["vilt", "tvlt", "tbn", "bn-inception", "self-mm", "av-hubert-base", "av-hubert-large"],
)
def test_model_size_equals_the_published_one(construct, expected):
    with torch.device("meta"):
        assert millions(construct()) == pytest.approx(expected, abs=0.06)


def without_head(network):
    network.head = nn.Identity()
    return network
