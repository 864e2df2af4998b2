"""Parts of pretrained models: a replica loads only the part it runs."""

from typing import Any

import pytest
import torch

from tests.model_servers.chat.chat_client import a_chat, a_chat_spec
from tests.model_servers.chat.module_parameters import parameters_within
from tests.model_servers.chat.test_hf_vlm import SIZES, TINY, a_model, a_photo, stored
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.chat.interfaces import ChatComponents
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS
from trimtab_model_servers.families.hf_vlm.family import build
from trimtab_model_servers.families.hf_vlm.parts import Placement
from trimtab_model_servers.server.chat_loader import load_chat

WRITES = ("model.language_model.", "model.text_model.", "lm_head.")


def built(name: str, part: str, storage_uri: str = "random://?seed=1", **parameters: Any) -> ChatComponents:
    spec = a_chat_spec(part, family=f"{name}/{part}", parameters=TINY | parameters, storageUri=storage_uri)
    return build(spec)


def same(found: list[torch.nn.Parameter], expected: dict[str, torch.Tensor]) -> bool:
    left = list(expected.values())
    for one in found:
        place = next((at for at, other in enumerate(left) if torch.equal(one, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("from_folder", [False, True])
def test_part_holds_only_its_own_weights(name, from_folder, tmp_path):
    model = a_model(name)
    address = str(stored(name, tmp_path, model)) if from_folder else "random://?seed=1"
    of_model = dict(model.named_parameters())
    writes = {at: weights for at, weights in of_model.items() if at.startswith(WRITES)}
    sees = {at: weights for at, weights in of_model.items() if at not in writes}

    encode, text, colocated = (built(name, part, address) for part in ("encode", "text", "colocated"))
    assert same(parameters_within(encode), sees)
    assert same(parameters_within(text), writes)
    assert same(parameters_within(colocated), of_model)
    for part in (encode, text, colocated):
        assert not any(weights.requires_grad for weights in parameters_within(part))


def test_model_with_tied_embeddings_is_loaded_by_parts(tmp_path):
    shape = CONFIGS["internvl3-8b"]("tiny")
    config = shape.config()
    config.tie_word_embeddings = True
    model = shape.model_class(config)
    of_model = dict(model.named_parameters())
    sees = {at: weights for at, weights in of_model.items() if not at.startswith(WRITES)}
    address = str(stored("internvl3-8b", tmp_path, model))

    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert same(parameters_within(built("internvl3-8b", "encode", address)), sees)
    assert same(parameters_within(built("internvl3-8b", "colocated", address)), of_model)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_encoder_returns_similar_fp32_embeddings(name, dtype, tmp_path):
    address = str(stored(name, tmp_path))
    exact, halved = built(name, "encode", address).encoder, built(name, "encode", address, dtype=dtype).encoder
    assert exact is not None
    assert halved is not None
    photo = a_photo(*SIZES[1])
    with torch.inference_mode():
        rows, nearly = (seeing.encode([seeing.preprocess(photo, 1)])[0] for seeing in (exact, halved))

    assert {weights.dtype for weights in parameters_within(halved)} == {getattr(torch, dtype)}
    assert nearly.dtype == torch.float32
    assert 0 < float((nearly - rows).norm() / rows.norm()) < 0.05
    assert exact.name != halved.name  # embeddings of one are not taken for those of the other


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision_model_generates(name, dtype):
    spec = a_chat_spec("colocated", family=f"{name}/colocated", parameters=TINY | {"dtype": dtype})
    hosted = load_chat(spec, BatchWorker())
    assert isinstance(hosted, ChatModel)
    answer = await hosted.infer(
        a_chat("colocated", "?", a_photo(*SIZES[1]), max_tokens=4, ignore_eos=True), BatchWorker()
    )
    await hosted.close()

    assert hosted.facts()["dtype"] == dtype
    assert int(answer.outputs[2].array[0][1]) == 4


def test_missing_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="device is 'cuda', but torch finds no GPU; set 'cpu' or 'auto'"):
        built("internvl3-8b", "encode", device="cuda")
    assert built("internvl3-8b", "encode", device="auto").facts["device"] == "cpu"


def test_requested_gpu_is_used_or_rejected_if_idle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    published: dict[str, Any] = {"family": "internvl3-8b/encode", "parameters": TINY}
    assert build(a_chat_spec("encode", **published, gpus=1)).facts["device"] == "cpu"
    with pytest.raises(ModelError, match="family 'lmm-digits/encode' computes on cores alone"):
        load_chat(a_chat_spec("encode", gpus=1), BatchWorker())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Placement("float32", "auto").torch_device.type == "cuda"
    settings = published | {"parameters": TINY | {"device": "cpu"}}
    with pytest.raises(ModelError, match="which would stay idle"):
        load_chat(a_chat_spec("encode", **settings, gpus=1), BatchWorker())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CONFIGS)
async def test_chat_is_generated_on_the_gpu(name):
    spec = a_chat_spec("colocated", family=f"{name}/colocated", parameters=TINY | {"device": "cuda"})
    hosted = load_chat(spec, BatchWorker())
    assert isinstance(hosted, ChatModel)
    answer = await hosted.infer(
        a_chat("colocated", "?", a_photo(*SIZES[1]), max_tokens=4, ignore_eos=True), BatchWorker()
    )
    await hosted.close()

    assert int(answer.outputs[2].array[0][1]) == 4
