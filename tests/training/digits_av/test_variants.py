"""Networks of digits-av: absent modalities, independent rows, calibrations and weight files."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families import registry
from trimtab_model_servers.families.digits_av import MODALITIES, SUBSETS, family, subset_name
from trimtab_model_servers.families.digits_av.base import Calibration, identity_calibration, select_modalities
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_training.digits_av.dataset import ItemSource
from trimtab_training.digits_av.evaluate import to_tensors

VARIANTS = list(family.VARIANTS)
BENT = np.stack([identity_calibration()[0], identity_calibration()[0] ** 2])
"""A curve that lowers confidences."""


@pytest.fixture(scope="module")
def inputs():
    return to_tensors(ItemSource("held-out", seed=9).items(0, 6))[0]


def a_network(variant, seed=0):
    return family.prepare_for_serving(family.build_network(family.VARIANTS[variant], seed=seed))


def encoders_of(network):
    if hasattr(network, "encoders"):
        return dict(network.encoders.items())
    return {"audio": network.sound, "video": network.patch, "text": network.letters}


@pytest.mark.parametrize("variant", VARIANTS)
def test_absent_modalities_are_not_computed(variant, inputs):
    network = a_network(variant)
    ran = set()
    for name, module in encoders_of(network).items():
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
    for subset in SUBSETS:
        ran.clear()
        answer = network.infer(select_modalities(inputs, subset))

        assert ran == set(subset)
        assert (answer["digit"].dtype, answer["confidence"].dtype) == (torch.int64, torch.float32)
        assert ((answer["confidence"] >= 0.1 - 1e-6) & (answer["confidence"] <= 1)).all()
    with pytest.raises(ValueError, match="give at least one of audio, video, text"):
        network.infer({})


def test_early_fusion_has_tokens_of_given_modalities_only(inputs):
    network = a_network("early")
    lengths = []
    network.trunk.register_forward_hook(lambda _, tokens, __: lengths.append(tokens[0].shape[1]))
    for subset in (("text",), ("audio", "text"), MODALITIES):
        network.logits(select_modalities(inputs, subset))

    assert lengths == [1 + 6, 1 + 10 + 6, 1 + 10 + 4 * 9 + 6]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_independent(variant, inputs):
    network = a_network(variant)
    together = network.logits({name: torch.cat([tensor] * 3) for name, tensor in inputs.items()})
    alone = torch.cat([network.logits({name: tensor[n : n + 1] for name, tensor in inputs.items()}) for n in range(6)])

    assert torch.allclose(together, torch.cat([alone] * 3), atol=1e-4)


def test_late_fusion_reuses_encoded_features(inputs):
    network = a_network("late")
    first = {name: network.encode(name, inputs[name]) for name in ("audio", "text")}
    network.encoders["audio"].register_forward_hook(lambda *_: pytest.fail("the audio was encoded again"))
    again = network.fuse(first | {"video": network.encode("video", inputs["video"])})

    assert torch.allclose(again, a_network("late").logits(inputs), atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_subset_has_its_own_calibration(variant, inputs):
    network = a_network(variant)
    before = {subset: network.infer(select_modalities(inputs, subset)) for subset in SUBSETS}
    network.calibrate(("audio",), Calibration(4.0, identity_calibration()))
    network.calibrate(("video",), Calibration(1.0, BENT))
    for subset in SUBSETS:
        after = network.infer(select_modalities(inputs, subset))
        assert torch.equal(after["digit"], before[subset]["digit"])
        is_same = torch.equal(after["confidence"], before[subset]["confidence"])
        assert is_same == (subset not in {("audio",), ("video",)})


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_weights_load_as_the_same_network(variant, inputs, tmp_path):
    network, path = a_network(variant, seed=3), tmp_path / "x.safetensors"
    network.calibrate(MODALITIES, Calibration(2.0, BENT))
    family.save(network, path)
    again = family.load(path)

    assert again.config == network.config
    assert torch.allclose(again.logits(inputs), network.logits(inputs), atol=0.05)
    assert again.calibration(MODALITIES).temperature == 2.0
    assert again.calibration(MODALITIES).knots == pytest.approx(BENT, abs=1e-3)


def test_unusable_weights_are_rejected(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="family None"):
        family.load(tmp_path / "other.safetensors")


def a_spec(family, uri, **changes):
    tensors = [
        {"name": "audio", "datatype": "INT16", "shape": [6400], "optional": True},
        {"name": "video", "datatype": "UINT8", "shape": [4, 24, 24], "optional": True},
        {"name": "text", "datatype": "UINT8", "shape": [6], "optional": True},
    ]
    points = [{"name": subset_name(s), "modalities": list(s), "accuracy": 0.5} for s in SUBSETS]
    outputs = [{"name": "digit", "datatype": "INT64"}, {"name": "confidence", "datatype": "FP32"}]
    document = {"name": "x", "family": family, "storageUri": uri, "inputs": tensors, "outputs": outputs}
    return ModelSpec.model_validate(document | {"accuracy": 0.5, "operatingPoints": points} | changes)


def test_family_uses_modalities_of_point_and_batch(inputs):
    network = registry.build(a_spec("digits-av/late", "random://?seed=1")).network
    point = a_spec("digits-av/late", "random://?seed=1").point("audio-text")
    both = network.infer(inputs, point)

    assert torch.equal(
        both["confidence"], network.infer(select_modalities(inputs, ("audio", "text")), point)["confidence"]
    )
    assert network.infer(select_modalities(inputs, ("video", "text")), point)["digit"].shape == (6,)


def test_family_rejects_other_weights_and_parameters(tmp_path):
    family.save(a_network("early"), tmp_path / "early.safetensors")
    with pytest.raises(ModelError, match="not of family 'digits-av/late'"):
        registry.build(a_spec("digits-av/late", str(tmp_path / "early.safetensors")))
    with pytest.raises(ModelError, match=r"parameters\.depth: Extra inputs are not permitted"):
        registry.build(a_spec("digits-av/late", "random://?seed=1", parameters={"depth": 2}))
