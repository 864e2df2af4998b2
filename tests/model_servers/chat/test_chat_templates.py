"""Stored chat templates: prompts equal transformers' processor; callers' text stays text."""

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from PIL.Image import Image
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import Idefics3ImageProcessor, Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from tests.model_servers.chat.chat_client import a_chat_spec, files, texts
from tests.model_servers.chat.templates import INTERLEAVED, by_template, rendered
from tests.model_servers.chat.test_hf_chat import SIZES, TINY, a_model, a_photo
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.chat.interfaces import EmbeddingShape, Prompt
from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.hf_chat.chat_templates import read_special_tokens, read_templates
from trimtab_model_servers.families.hf_chat.chat_tokenizer import HfChatTokenizer
from trimtab_model_servers.families.hf_chat.configs import CONFIGS
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.family import QuestionTemplate
from trimtab_model_servers.server.chat_loader import load_chat
from trimtab_protocol import InferRequest

NAME = "smolvlm2-2.2b"
MARKS = ("<sep>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>")
TILE_TOKENS = 4
_CORPUS = ["User: What is this? Assistant: What this is.\n\n", "User:What\nUser: is\n\n\nAssistant: Be brief. System: "]
OTHER = (
    "{% for message in messages %}[{{ message['role'] | upper }}]{{ eos_token }}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %} <sep> \n[ANSWER]{% endif %}"
)
"""ImageProcessing first, then all a turn's words, without a mark between them."""
TEXT_ONLY = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
IMAGE = {"type": "image"}


def a_tokenizer() -> Tokenizer:
    """A tokenizer that merges across spaces and newlines; not all markers are special, and one strips spaces."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS * 9, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    room = 300 - tokenizer.get_vocab_size()
    apart = AddedToken("<sep>", lstrip=True, rstrip=True, special=True)
    tokenizer.add_special_tokens(
        [apart, *MARKS[1:], *(f"<unused_{number}>" for number in range(room - len(MARKS))), "<image>"]
    )
    tokenizer.add_tokens([AddedToken(f"<row_{r}_col_{c}>", normalized=False) for r in (1, 2, 3) for c in (1, 2, 3)])
    assert tokenizer.token_to_id("<image>") == CONFIGS[NAME]("tiny").image_id
    return tokenizer


def a_folder(folder: Path, template: str | None = DEFAULT_CHAT_TEMPLATE) -> Path:
    a_model(NAME).save_pretrained(folder)
    a_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<end_of_utterance>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def by_processor(messages: Sequence[dict[str, Any]], pictures: Sequence[Image], template: str) -> list[int]:
    """Token ids of a chat by transformers' processor, with images."""
    tile = CONFIGS[NAME]("tiny").tile_px
    processor: Any = Idefics3Processor(
        Idefics3ImageProcessor(size={"longest_edge": 3 * tile}, max_image_size={"longest_edge": tile}),
        PreTrainedTokenizerFast(tokenizer_object=a_tokenizer(), bos_token=MARKS[4], eos_token=MARKS[3]),
        image_seq_len=TILE_TOKENS,
        chat_template=template,
    )
    text = processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    images = {"images": [list(pictures)]} if pictures else {}
    output = processor(text=text, add_special_tokens=False, return_tensors="pt", **images)
    return [int(id_) for id_ in output["input_ids"][0]]


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


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("content", INTERLEAVED)
def test_prompt_without_a_folder_equals_the_models_template(name, content):
    config, chat = CONFIGS[name]("tiny"), said(*content)
    largest_grid = [EmbeddingShape(28, columns=2), EmbeddingShape(4)]
    rows = largest_grid if config.marks_tiles else [EmbeddingShape(3), EmbeddingShape(5)]
    messages = [Message.model_validate(message) for message in chat]
    prompt = HfChatTokenizer(config, config.model()).build_prompt(messages, rows)
    tokens, starts = by_template(name, chat, rows)

    assert list(prompt.tokens) == tokens
    assert [place.start for place in prompt.image_spans] == starts


CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"
DOCUMENTED = {
    "llava-onevision-7b": CHATML.format("<image>\nSee  it."),
    "internvl3-8b": CHATML.format("See <IMG_CONTEXT>\n it."),
    "llama-3.2-vision-11b": f"<|begin_of_text|>{LLAMA.format('system')}Be brief.<|eot_id|>"
    f"{LLAMA.format('user')}See <|image|> it.<|eot_id|>{LLAMA.format('assistant')}",
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_chat_is_written_as_the_publisher_documents(name):
    assert rendered(name, said("See ", IMAGE, " it.")) == DOCUMENTED[name]


def test_images_first_model_rejects_text_between_images():
    stored = models.random_model(1, "decoder-only")
    page, words, space = IMAGE, {"type": "text", "text": "Read page 2."}, {"type": "text", "text": "\n"}

    def prompt(*content: dict[str, str]) -> Prompt:
        message = Message.model_validate({"role": "user", "content": list(content)})
        template = QuestionTemplate(stored.tokenizer, stored.architecture)
        return template.build_prompt([message], [EmbeddingShape(16)] * message.image_count)

    assert prompt(page, page, words).tokens == prompt(words, page, page).tokens
    assert len(prompt(page, space, page, words).image_spans) == 2
    with pytest.raises(RefusalError, match="text between two images"):
        prompt(page, words, page)


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
    counted, answer = await hosted.count(request), await hosted.infer(request, worker)
    await hosted.close()
    prompt, _, image, _, text = (int(number) for number in answer.outputs[2].array[0])

    pictures = [Pillow.open(io.BytesIO(photo)) for photo in photos]
    neutral = said(IMAGE, "image or", IMAGE, "What?")
    assert (counted.prompt_tokens, counted.text_tokens, sum(counted.image_tokens)) == (prompt, text, image)
    assert prompt > len(by_processor(neutral, pictures, OTHER))
    assert image == sum(token == 300 for token in by_processor(neutral, pictures, OTHER))
