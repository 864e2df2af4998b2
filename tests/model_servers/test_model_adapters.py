"""Families: outputs, weights and knobs; models that do not fit their stage are rejected."""

import numpy as np
import pytest
import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.digits import family
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol import DTYPES

X_AND_Z = [
    {"name": "x", "datatype": "FP32", "shape": [4]},
    {"name": "z", "datatype": "FP32", "shape": [-1], "optional": True},
]


def a_spec(**changes) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "small",
            "family": "echo",
            "storageUri": "random://?seed=1",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [4]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [4]}],
            "maxBatchSize": 3,
            "operatingPoints": [{"accuracy": 0.9}],
            "accuracy": 0.9,
        }
        | changes
    )


def run(spec: ModelSpec, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return load_model(spec).network.infer(inputs, spec.operating_points[0])


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "INT8", "INT32", "INT64", "UINT8"])
def test_echo_keeps_the_datatype(datatype):
    tensor = {"datatype": datatype, "shape": [4]}
    spec = a_spec(inputs=[{"name": "x"} | tensor], outputs=[{"name": "y"} | tensor], parameters={"increment": 2})
    x = np.ones((3, 4), DTYPES[datatype])
    y = load_model(spec).network.infer({"x": x}, spec.operating_points[0])["y"]
    assert y.dtype == x.dtype
    assert np.array_equal(y, x + 2)


LOCATE = {
    "family": "digits/locator",
    "inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, 96, 96]}],
    "outputs": [
        {"name": "count", "datatype": "INT64"},
        {"name": "boxes", "datatype": "FP32", "shape": [4], "countedBy": "count"},
        {"name": "crops", "datatype": "UINT8", "shape": [1, 28, 28], "countedBy": "count"},
        {"name": "confidence", "datatype": "FP32"},
    ],
}
READ = {
    "family": "digits/reader",
    "inputs": [{"name": "crop", "datatype": "UINT8", "shape": [1, 28, 28]}],
    "outputs": [{"name": "digit", "datatype": "INT64"}, {"name": "confidence", "datatype": "FP32"}],
}


@pytest.mark.parametrize(("stage", "variant"), [(LOCATE, "locate-xs"), (READ, "read-xs")])
def test_digits_networks_load_saved_weights(tmp_path, stage, variant):
    network = family.prepare_for_serving(family.build_network(variant, seed=4))
    family.save(network, family.VARIANTS[variant], tmp_path / "model.safetensors")
    tensor = stage["inputs"][0]
    images = torch.randint(0, 255, (3, *tensor["shape"]), dtype=torch.uint8)
    with torch.inference_mode():
        expected = family.load(tmp_path / "model.safetensors").infer({tensor["name"]: images})
    answer = run(a_spec(storageUri=str(tmp_path), **stage), **{tensor["name"]: images})
    assert answer.keys() == {output["name"] for output in stage["outputs"]}
    assert all(torch.equal(answer[name], expected[name]) for name in answer)


def test_digits_weights_of_the_other_stage_are_rejected(tmp_path):
    network = family.prepare_for_serving(family.build_network("read-xs", seed=4))
    family.save(network, family.VARIANTS["read-xs"], tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="these weights are of a reader, but family 'digits/locator' is a locat"):
        load_model(a_spec(storageUri=str(tmp_path), **LOCATE))


def test_random_digits_networks_are_marked():
    model = load_model(a_spec(name="locate-s", **LOCATE))
    assert model.facts()["weights"] == "random"
    with pytest.raises(ModelError, match="unknown variant 'locate-z'"):
        load_model(a_spec(parameters={"variant": "locate-z"}, **LOCATE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": {"delay_seconds": -1}}, "parameters.delay_seconds: Input should be greater than or equal to 0"),
        (
            {"parameters": {"delay": 1}},
            "parameters.delay: Extra inputs are not permitted; there are: increment, delay_s",
        ),
        ({"inputs": [{"name": "x", "datatype": "BYTES"}]}, "'echo' cannot run on the stage's inputs"),
        (
            {"outputs": [{"name": "y", "datatype": "INT64", "shape": [4]}]},
            "gives output 'y' as FP32, but the stage declares INT64; correct outputs.y.datatype",
        ),
        (
            {"outputs": [{"name": "y", "datatype": "FP32", "shape": [5]}]},
            r"gives output 'y' with shape \[1, 4\] for 1 rows, but the stage declares \[5\] for each",
        ),
        (
            {"outputs": [{"name": "y", "datatype": "FP32", "shape": [4]}, {"name": "z", "datatype": "FP32"}]},
            "gives no output 'z' as the stage declares; it gives: y",
        ),
    ],
)
def test_model_that_does_not_fit_its_stage_fails_to_load(changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(a_spec(**changes))


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
    model = load_model(a_spec(inputs=X_AND_Z, operatingPoints=points(modalities=["x"])))

    assert model.network.infer({"x": np.zeros((1, 4))}, model.spec.operating_points[1])["y"].shape == (1, 4)
    with pytest.raises(ModelError, match="leaves out 'x'"):
        load_model(a_spec(inputs=X_AND_Z, operatingPoints=points(modalities=["z"])))
