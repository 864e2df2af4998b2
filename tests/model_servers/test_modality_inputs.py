"""Multimodal families: no computation for absent modalities."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.model_servers.test_model_adapters import a_spec
from trimtab_model_servers.families import registry
from trimtab_model_servers.families.tbn import FEATURES
from trimtab_pipelines.operating_point import OperatingPoint

ALL = OperatingPoint(accuracy=0.5)


def point(*modalities):
    return OperatingPoint(name="-".join(modalities), modalities=modalities, accuracy=0.5)


@pytest.fixture(scope="module")
def rows():
    random = torch.Generator().manual_seed(1)

    def pixels(*shape):
        return torch.randint(0, 255, shape, dtype=torch.uint8, generator=random)

    return {
        "tvlt": {"audio": torch.randn(1, 32, 128, generator=random), "video": pixels(1, 2, 3, 224, 224)},
        "vilt": {"text": torch.tensor([[5000, 6000, -1]]), "image": torch.randn(1, 3, 384, 384, generator=random)},
        "tbn": {
            "image": pixels(1, 1, 3, 64, 64),
            "flow": pixels(1, 1, 10, 64, 64),
            "audio": torch.randn(1, 1, 1, 64, 64, generator=random),
        },
        "self-mm": {
            "text": torch.tensor([[5000, 6000, -1]]),
            "audio": torch.randn(1, 9, 74, generator=random),
            "video": torch.randn(1, 9, 35, generator=random),
        },
        "av-hubert": {"video": pixels(1, 3, 88, 88), "audio": torch.randn(1, 3, 104, generator=random)},
    }


SMALL: dict[str, tuple[str, dict[str, int]]] = {
    "tvlt": ("multimodal/tvlt", {"depth": 1, "width": 64, "heads": 4, "frames": 2}),
    "vilt": ("multimodal/vilt", {"layers": 1}),
    "tbn": ("multimodal/tbn", {}),
    "self-mm": ("multimodal/self-mm", {"layers": 1}),
    "av-hubert": ("multimodal/av-hubert-base", {"layers": 1, "max_new_tokens": 8}),
}


def build(name, storage_uri) -> Any:
    family, parameters = SMALL[name]
    return registry.build(a_spec(family=family, parameters=parameters, storageUri=storage_uri))


@pytest.fixture(scope="module")
def networks():
    return {name: build(name, "random://?seed=0").network for name in SMALL}


def encoder_of(name, network, modality):
    """The module that reads a modality and nothing else."""
    return {
        "tvlt": lambda: {"audio": network.audio_patch, "video": network.video_patch}[modality],
        "vilt": lambda: {
            "image": network.model.embeddings.patch_embeddings,
            "text": network.model.embeddings.text_embeddings,
        }[modality],
        "tbn": lambda: network.encoders[modality],
        "self-mm": lambda: network.bert if modality == "text" else network.sequences[modality],
        "av-hubert": lambda: {"audio": network.sound, "video": network.lips}[modality],
    }[name]()


@pytest.mark.parametrize("name", SMALL)
def test_absent_modality_is_not_computed(name, networks, rows):
    network, given = networks[name], rows[name]
    for absent in given:
        others = tuple(one for one in given if one != absent)
        ran: list[int] = []
        counted = encoder_of(name, network, absent).register_forward_hook(lambda *_, ran=ran: ran.append(1))
        with torch.inference_mode():
            left_out = network.infer(given, point(*others))
            expected_runs = 1 if (name, absent) == ("vilt", "text") else 0  # its class token, which the head reads
            assert len(ran) == expected_runs
            not_sent = network.infer({one: given[one] for one in others}, ALL)
            whole = network.infer(given, ALL)
        counted.remove()

        for output, tensor in left_out.items():
            assert torch.equal(tensor, not_sent[output])
            assert tensor.shape[0] == 1
        assert any(not torch.equal(left_out[output], whole[output]) for output in whole)


@pytest.mark.parametrize("name", SMALL)
def test_tensors_are_created_on_the_device_of_the_network(name, networks, rows):
    """A tensor created without a device is on the meta device here, and cannot be combined with the network's."""
    network = networks[name]
    for sent in ({one: rows[name][one]} for one in rows[name]):
        with torch.inference_mode():
            expected = network.infer(sent, ALL)
            with torch.device("meta"):
                answers = network.infer(sent, ALL)
        assert all(torch.equal(answer, expected[output]) for output, answer in answers.items())
    moved = build(name, "random://?seed=0").network
    moved.move_to(torch.device("meta"))
    assert {parameter.device.type for parameter in moved.parameters()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SMALL)
def test_answers_on_a_gpu_are_those_on_cores(name, networks, rows):
    moved = build(name, "random://?seed=0").network
    moved.move_to(torch.device("cuda"))
    for sent in ({one: rows[name][one]} for one in rows[name]):
        with torch.inference_mode():
            expected = networks[name].infer(sent, ALL)
            answers = moved.infer({one: tensor.to("cuda") for one, tensor in sent.items()}, ALL)
        assert torch.allclose(answers["confidence"].cpu(), expected["confidence"], atol=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_stored_weights_give_the_same_outputs(name, networks, rows, tmp_path):
    path, original = tmp_path / "weights.safetensors", networks[name]
    save_file(original.state_dict(), path)
    built = build(name, str(path))

    assert built.weights == "stored"
    assert not [one for one, buffer in built.network.named_buffers() if buffer.is_meta]
    with torch.inference_mode():
        expected, answer = original.infer(rows[name], ALL), built.network.infer(rows[name], ALL)
    for output, tensor in expected.items():
        assert torch.allclose(answer[output], tensor, rtol=1e-4)  # a file's tensors lie otherwise in memory


@pytest.mark.parametrize("name", SMALL)
def test_single_modality_suffices_and_none_is_rejected(name, networks, rows):
    for one in rows[name]:
        with torch.inference_mode():
            answer = networks[name].infer({one: rows[name][one]}, point(one))
        assert torch.isfinite(answer["confidence"]).all()
    with pytest.raises(ValueError, match="the request has none of the inputs"):
        networks[name].infer({}, ALL)


def test_vilt_equals_transformers(networks, rows):
    network, given = networks["vilt"], rows["vilt"]
    ids = torch.tensor([[101, 5000, 6000, 102]])
    with torch.inference_mode():
        stock = network.model(input_ids=ids, pixel_values=given["image"]).pooler_output

        assert torch.allclose(network.head(stock), network(given), atol=1e-5)


def test_tvlt_has_tokens_of_given_modalities_only(networks, rows):
    network, given = networks["tvlt"], rows["tvlt"]

    assert network.embed_audio(given["audio"]).shape[1] == 2 * 8
    assert network.embed_video(given["video"]).shape[1] == 2 * 196
    with pytest.raises(ValueError, match="at least 16 frames, not 7"):
        network.embed_audio(given["audio"][:, :7])


def test_tbn_without_a_modality_equals_zero_features(networks, rows):
    network = networks["tbn"]
    with torch.inference_mode():
        flow = network.encode("flow", rows["tbn"]["flow"])
        zeros = torch.zeros(1, 1, FEATURES)
        for reported, dropped in zip(
            network.fuse({"flow": flow}), network.fuse({"image": zeros, "flow": flow, "audio": zeros}), strict=True
        ):
            assert torch.allclose(reported, dropped, atol=1e-5)


def test_self_mm_ignores_padding(networks, rows):
    network, audio = networks["self-mm"], rows["self-mm"]["audio"]
    padded = torch.cat([audio, torch.zeros(1, 4, 74)], dim=1)
    with torch.inference_mode():
        assert torch.equal(network.encode("audio", audio), network.encode("audio", padded))
