"""Families `hf/text-generation` and `hf/image-text-to-text`: any stored chat model by its config.json."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.model_servers.chat.chat_client import ANSWER, MESSAGES, OPTIONS, a_chat, a_chat_spec, text_of
from tests.model_servers.chat.test_hf_chat import SIZES, TINY, a_photo, stored
from tests.tiny_llama import write_model
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.server.chat_loader import load_chat

TOKENS = 24
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "Mistral": {"sliding_window": None},
    "Gemma": {"head_dim": 64, "tie_word_embeddings": True},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "GPTNeoX": ({}, "model_type 'gpt_neox' is not supported"),
    "Granite": ({"logits_scaling": 8.0}, "model_type 'granite' is not supported"),
    "Mistral": ({"sliding_window": 64}, "sliding-window attention is not supported"),
}
FAMILY = "hf/text-generation"


def write(folder: Path, architecture: str, **changes: Any) -> Path:
    write_model(folder, architecture, "float32", initializer_range=0.2, **changes)
    return folder


def load(folder: Path, **changes: Any) -> ChatModel:
    spec = a_chat_spec(
        "colocated", family=FAMILY, storageUri=str(folder), inputs=[MESSAGES, OPTIONS], outputs=ANSWER, **changes
    )
    model = load_chat(spec, BatchWorker())
    assert isinstance(model, ChatModel)
    return model


def generate(folder: Path, text: str, count: int = TOKENS) -> str:
    """Text that transformers' `generate` writes for a user's message."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("architecture", DECODERS)
async def test_answer_of_a_stored_decoder_equals_generate(architecture, tmp_path):
    folder = write(tmp_path, architecture, **DECODERS[architecture])
    model = load(folder)
    for text in ("What is a stage?", "A replica " * 20):
        answer = await model.infer(a_chat("colocated", text, max_tokens=TOKENS, min_tokens=TOKENS), BatchWorker())
        assert text_of(answer)[0].rstrip("\ufffd") == generate(folder, text).rstrip("\ufffd")
    await model.close()

    assert model.weights == "stored"


@pytest.mark.parametrize("architecture", REFUSED)
def test_unsupported_decoders_are_rejected_by_name(architecture, tmp_path):
    changes, reason = REFUSED[architecture]
    with pytest.raises(ModelError, match=reason):
        load(write(tmp_path, architecture, **changes))


def test_decoder_without_a_chat_template_is_rejected(tmp_path):
    folder = write(tmp_path, "Llama")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"no chat template that can be used; add chat_template\.jinja"):
        load(folder)


def test_text_generation_requires_a_folder(tmp_path):
    with pytest.raises(ModelError, match=r"weights of a folder, s3://BUCKET/PREFIX or hf://OWNER/NAME"):
        load(tmp_path)


async def test_callers_text_adds_no_special_token_to_a_decoder(tmp_path):
    model = load(write(tmp_path, "Llama"))
    counted = [await model.count(a_chat("colocated", text)) for text in ("?", "</s>")]
    await model.close()

    end = model.tokenizer.tokenizer.token_to_id("</s>")
    assert end in model.tokenizer.end_ids
    assert counted[1].prompt_tokens > counted[0].prompt_tokens


@pytest.mark.parametrize("name", ["internvl3-8b", "smolvlm2-500m", "llama-3.2-vision-11b"])
async def test_stored_multimodal_model_is_found_by_its_config(name, tmp_path):
    folder, chat = str(stored(name, tmp_path)), a_chat("colocated", "?", a_photo(*SIZES[1]), max_tokens=8)
    answers = []
    for family in (f"{name}/colocated", "hf/image-text-to-text"):
        spec = a_chat_spec("colocated", family=family, parameters=TINY, storageUri=folder)
        model = load_chat(spec, BatchWorker())
        assert isinstance(model, ChatModel)
        answers.append(text_of(await model.infer(chat, BatchWorker())))
        await model.close()

    assert answers[0] == answers[1]


def test_model_without_images_is_no_multimodal_family(tmp_path):
    spec = a_chat_spec("colocated", family="hf/image-text-to-text", storageUri=str(write(tmp_path, "Llama")))
    with pytest.raises(ModelError, match=r"\('llama', None, None\), which no family has; known types are idefics3"):
        load_chat(spec, BatchWorker())
