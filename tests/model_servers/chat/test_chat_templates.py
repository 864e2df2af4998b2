"""Stored chat templates: prompts equal transformers' processor; callers' text stays text."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from tests.model_servers.chat.chat_client import a_chat_spec, files, texts
from tests.model_servers.chat.smol_folder import MARKS, NAME, a_folder, by_processor
from tests.model_servers.chat.test_hf_vlm import SIZES, TINY, a_photo
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.chat.interfaces import EmbeddingShape, Prompt
from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.hf_vlm.chat_templates import read_special_tokens, read_templates
from trimtab_model_servers.families.hf_vlm.chat_tokenizer import HfChatTokenizer
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS
from trimtab_model_servers.server.chat_loader import load_chat
from trimtab_protocol import InferRequest

OTHER = (
    "{% for message in messages %}[{{ message['role'] | upper }}]{{ eos_token }}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %} <sep> \n[ANSWER]{% endif %}"
)
"""ImageProcessing first, then all a turn's words, without a mark between them."""
TEXT_ONLY = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
IMAGE = {"type": "image"}


def said(*content: str | dict[str, str]) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    system = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    return [*system, {"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_folder(tmp_path_factory.mktemp("model"), None)


@pytest.fixture
def folder(weights: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(weights, tmp_path / "model"))


def speech(folder: Path) -> HfChatTokenizer:
    shape = CONFIGS[NAME]("tiny")
    return HfChatTokenizer(shape, shape.model(), folder)


def spelled(folder: Path, messages: list[dict[str, Any]], *sizes: tuple[int, int]) -> Prompt:
    counts = [CONFIGS[NAME]("tiny").token_rule.count(*size) for size in sizes]
    rows = [EmbeddingShape(count.placeholders, columns=count.columns) for count in counts]
    return speech(folder).build_prompt([Message.model_validate(message) for message in messages], rows)


@pytest.mark.parametrize("template", [DEFAULT_CHAT_TEMPLATE, OTHER, None])
@pytest.mark.parametrize("sizes", [[], SIZES[:1], SIZES, [(28, 28), (900, 20)]])
def test_prompt_equals_the_models_processor(folder, template, sizes):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    parts = [part for number, _ in enumerate(sizes) for part in (f" Page {number}:\n", IMAGE)]
    messages = said(*parts, "\nWhat is this? ")
    pictures = [Pillow.new("RGB", size) for size in sizes]
    prompt = spelled(folder, messages, *sizes)

    assert list(prompt.tokens) == by_processor(messages, pictures, template or DEFAULT_CHAT_TEMPLATE)
    where = [place for place, token in enumerate(prompt.tokens) if token == CONFIGS[NAME]("tiny").image_id]
    runs = [run for place in prompt.image_spans for run in place.segments or ((place.start, place.placeholders),)]
    assert [start + each for start, count in runs for each in range(count)] == where


@pytest.mark.parametrize("template", [DEFAULT_CHAT_TEMPLATE, OTHER, None])
@pytest.mark.parametrize(
    "words", [("<image>",), ("<ima", IMAGE, "ge>"), (*MARKS, "<row_1_col_1>"), ("<end_of_", IMAGE, "utterance>")]
)
def test_special_tokens_of_callers_are_text(folder, template, words):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    images = sum(part == IMAGE for part in words)
    harmless = [part if part == IMAGE else "".join(char for char in part if char not in "<>_|") for part in words]
    model = speech(folder)
    specials = set(range(286, 310)) & set(model.tokenizer.get_added_tokens_decoder())

    def counted(content: list[Any]) -> list[int]:
        tokens = spelled(folder, said(*content), *[(28, 28)] * images).tokens
        return [token for token in tokens if token in specials]

    assert counted(list(words)) == counted(harmless)
    if not images:
        tokens = spelled(folder, said(*words)).tokens
        assert "".join(words) in model.tokenizer.decode(tokens, skip_special_tokens=False)


def test_private_characters_of_callers_reach_the_model(folder):
    words = "".join(map(chr, range(0xE000, 0xE040))) + "<image>"

    assert words in speech(folder).tokenizer.decode(spelled(folder, said(words)).tokens, skip_special_tokens=False)


def test_templates_follow_transformers_precedence(folder):
    for file, wrapped in (
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": "4"}], "bos_token": "<b>"}),
        ("chat_template.jinja", "3"),
        ("chat_template.json", {"chat_template": "2"}),
        ("processor_config.json", {"chat_template": {"default": "1"}}),
    ):
        (folder / file).write_text(wrapped if isinstance(wrapped, str) else json.dumps(wrapped))

    assert [found.source for found in read_templates(folder)] == ["1", "2", "3", "4"]
    assert read_special_tokens(folder) == {"bos_token": "<b>"}


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (TEXT_ONLY, "can only concatenate str"),
        ("{% for %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0]['content'][1]['text'] }}", "does not write an image as <image>"),
        ("<image>", "does not write the caller's text"),
    ],
)
def test_template_without_image_support_is_skipped_and_logged(folder, caplog, template, why):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    model = speech(folder)

    assert model.template_source == "family"
    assert f"{folder}: the template in tokenizer_config.json is not used: " in caplog.text
    assert why in caplog.text
    (folder / "chat_template.jinja").write_text(OTHER)
    assert speech(folder).template_source == "stored"


def test_template_exception_is_reported(folder):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no <system> here') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refusing + DEFAULT_CHAT_TEMPLATE)
    with pytest.raises(RefusalError, match="template does not support them: no <system> here") as refused:
        spelled(folder, said("What?"))
    assert refused.value.status_code == 400


def test_image_omitted_by_template_is_rejected(folder):
    first_only = DEFAULT_CHAT_TEMPLATE.replace("{{ '<image>' }}", "{{ '<image>' if loop.first }}")
    (folder / "chat_template.jinja").write_text(first_only)
    with pytest.raises(RefusalError, match="template writes 1 of their 2 images"):
        spelled(folder, said(IMAGE, IMAGE, "What?"), (28, 28), (28, 28))


@pytest.mark.parametrize(("rows", "columns"), [(5, 0), (40, 0), (28, 4), (4, 3)])
def test_impossible_embedding_shape_is_rejected(folder, rows, columns):
    messages = [Message.model_validate(message) for message in said(IMAGE, "What?")]
    with pytest.raises(RefusalError, match="should be 4 for each tile and the global view"):
        speech(folder).build_prompt(messages, [EmbeddingShape(rows, columns=columns)])


@pytest.mark.parametrize(("file", "text"), [("chat_template.json", "{"), ("tokenizer_config.json", "[]")])
def test_invalid_configuration_file_is_named(folder, file, text):
    (folder / file).write_text(text)
    with pytest.raises(ModelError, match=file):
        speech(folder)


async def test_counted_tokens_equal_usage(folder):
    (folder / "chat_template.jinja").write_text(OTHER)
    spec = a_chat_spec("colocated", family=f"{NAME}/colocated", parameters=TINY, storageUri=str(folder))
    hosted, worker = load_chat(spec, BatchWorker()), BatchWorker()
    assert isinstance(hosted, ChatModel)
    assert hosted.facts()["template"] == "stored"
    photos = [a_photo(*size) for size in SIZES[:2]]
    content = texts("messages", json.dumps(said(IMAGE, "<image> or", IMAGE, "What?")).encode())
    options = texts("options", json.dumps({"max_tokens": 4, "ignore_eos": True}).encode())
    request = InferRequest("colocated", (content, options, files(*photos)))
    counted, answer = hosted.count(request), await hosted.infer(request, worker)
    await hosted.close()
    prompt, _, image, _, text = (int(number) for number in answer.outputs[2].array[0])

    pictures = [Pillow.open(io.BytesIO(photo)) for photo in photos]
    neutral = said(IMAGE, "image or", IMAGE, "What?")
    assert (counted.prompt_tokens, counted.text_tokens, sum(counted.image_tokens)) == (prompt, text, image)
    assert prompt > len(by_processor(neutral, pictures, OTHER))
    assert image == sum(token == 300 for token in by_processor(neutral, pictures, OTHER))
