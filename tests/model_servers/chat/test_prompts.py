"""Prompts equal the models' own templates."""

from typing import Any

import pytest

from tests.model_servers.chat.templates import INTERLEAVED, by_template
from trimtab_model_servers.chat.interfaces import EmbeddingShape, Prompt
from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.families.hf_vlm.chat_tokenizer import HfChatTokenizer
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.family import QuestionTemplate


def rows_of(name: str) -> list[EmbeddingShape]:
    """Shapes of two images; the first has the maximum tile grid if the model marks tiles."""
    cut = CONFIGS[name]("tiny").marks_tiles
    return [EmbeddingShape(28, columns=2), EmbeddingShape(4)] if cut else [EmbeddingShape(3), EmbeddingShape(5)]


def spelled(name: str, messages: list[dict[str, Any]]) -> Prompt:
    shape = CONFIGS[name]("tiny")
    read = [Message.model_validate(message) for message in messages]
    return HfChatTokenizer(shape, shape.model()).build_prompt(read, rows_of(name))


def asked(content: list[dict[str, str]]) -> list[dict[str, Any]]:
    said = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    return [*said, {"role": "user", "content": content}]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("content", INTERLEAVED)
def test_prompt_equals_the_models_template(name, content):
    prompt = spelled(name, asked(content))
    tokens, starts = by_template(name, asked(content), rows_of(name))

    assert list(prompt.tokens) == tokens
    assert [place.start for place in prompt.image_spans] == starts


@pytest.mark.parametrize(("name", "alike"), [(name, name == "llava-onevision-7b") for name in CONFIGS])
def test_image_order_changes_prompt_unless_images_come_first(name, alike):
    one, other = (spelled(name, asked(content)) for content in INTERLEAVED)

    assert (one.tokens == other.tokens) is alike
    assert (one.image_spans == other.image_spans) is alike


def digits(*content: dict[str, str]) -> Prompt:
    stored = models.random_model(1, "decoder-only")
    message = Message.model_validate({"role": "user", "content": list(content)})
    return QuestionTemplate(stored.tokenizer, stored.architecture).build_prompt(
        [message], [EmbeddingShape(16)] * message.image_count
    )


def test_images_first_model_rejects_text_between_images():
    page, words, space = {"type": "image"}, {"type": "text", "text": "Read page 2."}, {"type": "text", "text": "\n"}

    assert digits(page, page, words).tokens == digits(words, page, page).tokens
    assert len(digits(page, space, page, words).image_spans) == 2
    with pytest.raises(RefusalError, match="text between two images"):
        digits(page, words, page)
