"""Tiny pretrained architectures: outputs equal ``generate``, parts load their own weights, folders set the images."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models.mllama.processing_mllama as mllama
from PIL import Image as Pillow
from torch import nn
from transformers import GenerationConfig

from tests.model_servers.chat.chat_client import a_chat, a_chat_spec, files, text_of, texts
from tests.model_servers.chat.templates import INTERLEAVED, by_template
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.chat.interfaces import ChatComponents
from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_chat.chat_tokenizer import byte_tokenizer
from trimtab_model_servers.families.hf_chat.configs import CONFIGS
from trimtab_model_servers.families.hf_chat.family import HfVisionEncoder, build
from trimtab_model_servers.families.hf_chat.image_processor import read_image_processor
from trimtab_model_servers.families.hf_chat.parts import Placement, load_part
from trimtab_model_servers.families.registry import require_family
from trimtab_model_servers.server.chat_loader import load_chat
from trimtab_model_servers.weights.source import RandomSeed
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.image_tokens import RULES
from trimtab_protocol import InferRequest

TINY = {"size": "tiny", "slots": 2, "slot_tokens": 1500, "step_tokens": 90, "image_tokens": 200}
ENDS = ["<|im_end|>", "<|eot_id|>", "<end_of_utterance>"]
SIZES = [(56, 56), (90, 40), (33, 120)]
LANGUAGE_PARTS = ("model.language_model.", "model.text_model.", "lm_head.")
RULE_OF = {
    "llava-onevision-7b": "llava-onevision",
    "internvl3-8b": "internvl",
    "smolvlm-2.2b": "smolvlm",
    "smolvlm2-2.2b": "smolvlm",
    "smolvlm2-500m": "smolvlm-500m",
    "llama-3.2-vision-11b": "llama-3.2-vision",
}


def a_photo(width: int, height: int, grey: int | None = None) -> bytes:
    """A picture of noise, or of one grey."""
    file = io.BytesIO()
    pixels = np.random.default_rng(width).integers(256, size=(height, width, 3), dtype=np.uint8)
    if grey is not None:
        pixels[:] = grey
    Pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def parameters_within(root: object) -> list[nn.Parameter]:
    """Every parameter reachable from an object by attributes, items and closures, once, in order."""
    parameters: dict[int, nn.Parameter] = {}
    visited: dict[int, object] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop(0)
        if id(value) in visited or isinstance(value, type | ModuleType):
            continue
        visited[id(value)] = value
        if isinstance(value, nn.Module):
            parameters |= {id(weights): weights for weights in value.parameters()}
        waiting += _children(value)
    return list(parameters.values())


def _children(value: Any) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or ())
    else:
        yield from getattr(value, "__dict__", {}).values()
        yield from (
            getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
        )


def loaded(name: str, **changes: Any) -> ChatModel:
    hosted = load_chat(a_chat_spec("colocated", family=f"{name}/colocated", parameters=TINY, **changes), BatchWorker())
    assert isinstance(hosted, ChatModel)
    return hosted


def a_model(name: str, *, gates: float | None = None) -> Any:
    """The random model, both halves in one; at first its gates, if it has any, let nothing of an image through."""
    shape = CONFIGS[name]("tiny")
    model = shape.model().eval()
    halves: list[dict[str, Any]] = [
        load_part(shape, half, RandomSeed(1), Placement()).state_dict() for half in ("vision", "language")
    ]
    model.load_state_dict(halves[0] | halves[1])
    for parameter, weights in model.named_parameters():
        if gates is not None and parameter.endswith("gate"):
            torch.nn.init.constant_(weights, gates)
    return model


def alone(model: Any, name: str, content: list[dict[str, str]], photos: list[bytes], tokens: int) -> list[int]:
    """What ``generate`` writes of a template's prompt and of pixels that the processor made of all photos at once."""
    shape = CONFIGS[name]("tiny")
    encoder = HfVisionEncoder(shape, model, "")
    pictures = [Pillow.open(io.BytesIO(photo)).convert("RGB") for photo in photos]
    counts = [shape.token_rule.count(*picture.size, images=len(photos)) for picture in pictures]
    rows = [encoder.embedding_shape(count) for count in counts]
    ids = torch.tensor([by_template(name, [{"role": "user", "content": content}], rows)[0]])
    inputs: dict[str, Any] = (
        dict(shape.image_processing.processor()(images=[pictures], return_tensors="pt")) if photos else {}
    )
    inputs.pop("num_patches", None)
    if shape.padded_rows and photos:
        seen = mllama.get_cross_attention_token_mask(ids[0].tolist(), shape.image_id)
        mask = mllama.convert_sparse_cross_attention_mask_to_dense([seen], inputs.pop("num_tiles"), 4, ids.shape[1])
        inputs["cross_attention_mask"] = torch.from_numpy(mask)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        wrote = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **inputs)
    return [int(token) for token in wrote[0, ids.shape[1] :]]


def decoded(hosted: ChatModel, ids: list[int]) -> str:
    return hosted.tokenizer.tokenizer.decode(ids).rstrip("\ufffd")


@pytest.mark.parametrize("name", CONFIGS)
async def test_outputs_equal_generate(name, tmp_path):
    model, photos = a_model(name, gates=1.0), [a_photo(*size) for size in SIZES[:2]]
    hosted, question = loaded(name, storageUri=str(stored(name, tmp_path, model))), {"type": "text", "text": "What?"}
    for content in ([question], [{"type": "image"}, question], *INTERLEAVED):
        shown = photos[2 - content.count({"type": "image"}) :]
        message = texts("messages", json.dumps([{"role": "user", "content": content}]).encode())
        options = texts("options", json.dumps({"max_tokens": 8, "ignore_eos": True}).encode())
        images = [files(*shown)] if shown else []
        answer = await hosted.infer(InferRequest("colocated", (message, options, *images)), BatchWorker())
        expected = alone(model, name, content, shown, 8)
        assert text_of(answer) == [decoded(hosted, expected)]
        assert len(shown) < 2 or expected != alone(model, name, content, photos[::-1], 8)
    await hosted.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_published_size_counts_tokens_by_its_rule(name):
    rule = CONFIGS[name]("published").token_rule

    assert [rule.count(*size) for size in SIZES] == [RULES[RULE_OF[name]].count(*size) for size in SIZES]


def stored(name: str, folder: Path, model: Any = None) -> Path:
    """A model as transformers writes it, in several files.

    The random one has a tokenizer that knows the turns' marks, another one that spells them byte by byte.
    """
    (model or a_model(name)).save_pretrained(folder, max_shard_size="100KB")
    tokenizer = byte_tokenizer(CONFIGS[name]("tiny").image_id - 20)
    if model is None:
        tokenizer.add_special_tokens(ENDS)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
async def test_stored_model_of_several_files_has_its_own_tokenizer(name, tmp_path):
    folder = stored(name, tmp_path / name)
    assert len(list(folder.glob("*.safetensors"))) > 1
    hosted = loaded(name, storageUri=str(folder))
    await hosted.close()
    speech = hosted.tokenizer
    said = [Message.model_validate({"role": "user", "content": "".join(ENDS)})]
    ends = {id_ for mark in ENDS if (id_ := speech.tokenizer.token_to_id(mark)) is not None}

    assert hosted.weights == "stored"
    assert sum(token in ends for token in speech.build_prompt(said, []).tokens) == 1  # the turn's own, not the caller's


async def test_model_from_the_hub_equals_its_folder(running_hub, tmp_path):
    folder, chat = (
        stored("internvl3-8b", tmp_path / "model"),
        a_chat("colocated", "?", a_photo(*SIZES[1]), max_tokens=8),
    )
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    for file in folder.iterdir():
        running_hub.put("OpenGVLab/InternVL3-8B-hf", file.name, file.read_bytes())
    answers = []
    for where in ("hf://OpenGVLab/InternVL3-8B-hf", str(folder)):
        hosted = loaded("internvl3-8b", storageUri=where)
        answers.append(text_of(await hosted.infer(chat, BatchWorker())))
        assert (hosted.weights, hosted.facts()["images"]) == ("stored", "stored")
        await hosted.close()

    assert answers[0] == answers[1]


def test_folder_of_another_model_is_rejected(tmp_path):
    (tmp_path / "own.safetensors").touch()
    folder, others = stored("internvl3-8b", tmp_path / "colocated"), stored("llava-onevision-7b", tmp_path / "other")
    shutil.copytree(folder, tmp_path / "torn")
    max((tmp_path / "torn").glob("*.safetensors")).unlink()
    shutil.copytree(folder, tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    wrong = {
        str(tmp_path / "own.safetensors"): "random weights .* or those of a folder",
        str(tmp_path / "mute"): "no tokenizer.json",
        str(tmp_path / "torn"): "safetensors",
        str(others): "model_type, image token and image size are",
    }
    for where, words in wrong.items():
        spec = a_chat_spec("colocated", family="internvl3-8b/colocated", parameters=TINY, storageUri=where)
        with pytest.raises(ModelError, match=words):
            load_chat(spec, BatchWorker())


@pytest.mark.parametrize("pipeline", ["llava-onevision", "internvl", "smolvlm", "llama-vision"])
def test_pipeline_has_encoder_stage_unless_cross_attention(pipeline):
    spec = load_pipeline(Path(__file__).parents[3] / "pipelines" / pipeline / "pipeline.yaml").spec
    for variant in (variant for stage in spec.stages for variant in stage.variants):
        require_family(variant.family)
    family = spec.stages[0].variants[0].family.partition("/")[0]

    assert spec.chat_settings is not None
    assert any(stage.encodes for stage in spec.stages) == (CONFIGS[family]("published").padded_rows is None)


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
    writes = {at: weights for at, weights in of_model.items() if at.startswith(LANGUAGE_PARTS)}
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
    sees = {at: weights for at, weights in of_model.items() if not at.startswith(LANGUAGE_PARTS)}
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


ON_GPU = pytest.param({"device": "cuda"}, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("placement", [{"dtype": "bfloat16"}, {"dtype": "float16"}, ON_GPU])
async def test_model_generates_in_half_precision_and_on_a_gpu(name, placement):
    spec = a_chat_spec("colocated", family=f"{name}/colocated", parameters=TINY | placement)
    hosted = load_chat(spec, BatchWorker())
    assert isinstance(hosted, ChatModel)
    photo = a_photo(*SIZES[1])
    answer = await hosted.infer(a_chat("colocated", "?", photo, max_tokens=4, ignore_eos=True), BatchWorker())
    await hosted.close()

    assert placement.items() <= hosted.facts().items()
    assert int(answer.outputs[2].array[0][1]) == 4


def test_missing_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="device is 'cuda', but torch finds no GPU; set 'cpu' or 'auto'"):
        built("internvl3-8b", "encode", device="cuda")
    assert built("internvl3-8b", "encode", device="auto").facts["device"] == "cpu"


def test_requested_gpu_is_used_or_rejected_if_idle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    published: dict[str, Any] = {"family": "internvl3-8b/encode", "parameters": TINY}
    with pytest.raises(ModelError, match="torch finds no GPU here"):
        load_chat(a_chat_spec("encode", **published, gpus=1), BatchWorker())
    with pytest.raises(ModelError, match="family 'lmm-digits/encode' computes on cores alone"):
        load_chat(a_chat_spec("encode", gpus=1), BatchWorker())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Placement("float32", "auto").torch_device.type == "cuda"
    settings = published | {"parameters": TINY | {"device": "cpu"}}
    with pytest.raises(ModelError, match="which would stay idle"):
        load_chat(a_chat_spec("encode", **settings, gpus=1), BatchWorker())


OWN = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 0, "rescale_factor": 0.01}


def written(folder: Path, settings: dict[str, Any], *, nested: bool = False) -> Path:
    """A folder that says so of images, in a file of its own or, as transformers 5 has it, within the processor's."""
    file = "processor_config.json" if nested else "preprocessor_config.json"
    (folder / file).write_text(json.dumps({"image_processor": settings} if nested else settings))
    return folder


def pixels(processor: Any) -> np.ndarray:
    photo = Pillow.open(io.BytesIO(a_photo(*SIZES[1])))
    return np.asarray(processor(images=[[photo]], return_tensors="np")["pixel_values"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_pixels_equal_those_of_the_folders_processor(name, tmp_path, nested):
    assert read_image_processor(tmp_path) is None
    images = CONFIGS[name]("tiny").image_processing
    theirs = images.processor_class(**{**images.tiles, **images.values, **OWN})
    settings = json.loads(theirs.to_json_string())
    written(tmp_path, {"image_mean": [0.9, 0.9, 0.9]})  # what the newer form says counts
    stored = read_image_processor(written(tmp_path, settings, nested=nested))

    ours = images.processor(stored)

    assert np.array_equal(pixels(ours), pixels(theirs))
    assert not np.array_equal(pixels(ours), pixels(images.processor()))


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_that_change_tiles_are_rejected(name, tmp_path):
    images = CONFIGS[name]("published").image_processing
    same = json.loads(images.processor_class(**images.tiles).to_json_string())
    for said in (same, same | {"do_center_crop": False, "do_sample_frames": False, "crop_to_patches": False}):
        images.processor(read_image_processor(written(tmp_path, said)))
    for setting, other in [("size", {"height": 77, "width": 77}), ("do_resize", False)]:
        with pytest.raises(ModelError, match=f"preprocessor_config.json: {setting} is "):
            images.processor(read_image_processor(written(tmp_path, same | {setting: other})))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std.1: Input should be greater than 0"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"resample": 9}, "resample: Input should be less than or equal to 5"),
        ({"rescale_factor": "a lot"}, "rescale_factor"),
        ({"size": [[1], {"a": 2}]}, "size is"),
        ({"max_patches": 40}, "max_patches is 40; image tokens of this family are counted by 12"),
    ],
)
def test_invalid_image_settings_are_rejected(settings, why, tmp_path):
    with pytest.raises(ModelError, match=f"preprocessor_config.json: {why}"):
        CONFIGS["internvl3-8b"]("tiny").image_processing.processor(read_image_processor(written(tmp_path, settings)))
