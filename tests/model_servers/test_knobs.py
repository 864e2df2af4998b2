"""Knobs of operating points: supported ones are applied, others rejected."""

import pytest
import torch

from tests.model_servers.test_model_adapters import a_resnet, a_spec
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.server.hosted_model import load_model

INPUTS = [
    {"name": "x", "datatype": "FP32", "shape": [4]},
    {"name": "z", "datatype": "FP32", "shape": [-1], "optional": True},
]


def points(**knobs):
    return [{"name": "full", "accuracy": 0.9}, {"name": "less", "accuracy": 0.8} | knobs]


@pytest.mark.parametrize(
    ("knob", "value", "words"),
    [
        ("tokenDelta", -8, "does not support merging, which operating point 'less' sets"),
        ("precision", "INT8", r"does not support precision, .* .INT8.; it supports: modalities"),
    ],
)
def test_unsupported_knob_is_rejected(knob, value, words):
    with pytest.raises(ModelError, match=words):
        load_model(a_spec(operatingPoints=points(**{knob: value})))


def test_family_without_knobs_serves_plain_points():
    assert load_model(a_spec(operatingPoints=points())).facts()["operating_points"] == "full,less"


def test_echo_requires_its_input():
    model = load_model(a_spec(inputs=INPUTS, operatingPoints=points(modalities=["x"])))

    assert model.network.infer({"x": torch.zeros(1, 4)}, model.spec.operating_points[1])["y"].shape == (1, 4)
    with pytest.raises(ModelError, match="leaves out 'x'"):
        load_model(a_spec(inputs=INPUTS, operatingPoints=points(modalities=["z"])))


def test_input_size_of_a_point_resizes_the_image():
    model = load_model(a_resnet(operatingPoints=points(inputSize={"resolution": 64})))
    full, less = model.spec.operating_points
    smaller, flat = torch.randn(1, 3, 64, 64), torch.full((1, 3, 224, 224), 0.3)
    with torch.inference_mode():
        seen = model.network.infer({"image": smaller}, full)["logits"]
        answers = [model.network.infer({"image": image}, less)["logits"] for image in (smaller, flat)]

        assert torch.allclose(answers[0], seen)
        assert answers[1].shape == (1, 1000)
        assert not torch.allclose(answers[1], model.network.infer({"image": flat}, full)["logits"])


@pytest.mark.parametrize("size", [{"patch": 16}, {"resolution": 16}])
def test_invalid_input_size_is_rejected(size):
    with pytest.raises(ModelError, match="a resolution of 32 pixels or more, without a patch"):
        load_model(a_resnet(operatingPoints=points(inputSize=size)))
