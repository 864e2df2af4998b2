"""Prompts of the chat templates without a folder, rendered by transformers."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from trimtab_model_servers.chat.interfaces import EmbeddingShape
from trimtab_model_servers.families.hf_chat.chat_tokenizer import byte_tokenizer
from trimtab_model_servers.families.hf_chat.configs import CONFIGS

IMAGE = "\ue000"
"""Stands for an image in a rendered chat."""


def content(*parts: str | None) -> list[dict[str, str]]:
    """The content of a message, with an image for each None."""
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]


INTERLEAVED = [
    content("Before:", None, "After:", None, "What changed?"),
    content(None, "Before:After:", None, "What ", "changed?"),
]


def rendered(name: str, messages: list[dict[str, Any]]) -> str:
    """Text of a chat, with a mark for each image."""
    renderer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(320))
    template: Any = {"chat_template": CONFIGS[name]("tiny").template}
    return str(renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template))


def by_template(
    name: str, messages: list[dict[str, Any]], shapes: Sequence[EmbeddingShape]
) -> tuple[list[int], list[int]]:
    """Token ids of a chat by its template, byte by byte, and the start of each image."""
    config = CONFIGS[name]("tiny")
    first, *others = rendered(name, messages).split(config.image_mark)
    ids, starts = list(first.encode()), []
    for shape, text in zip(shapes, others, strict=True):
        image = image_prompt(name, shape)
        starts.append(len(ids) + len(image[: image.index(IMAGE)].encode()))
        for place, run in enumerate(image.split(IMAGE)):
            ids += ([config.image_id] if place else []) + list(run.encode())
        ids += text.encode()
    return ids, starts


def image_prompt(name: str, shape: EmbeddingShape) -> str:
    """The prompt of an image by its processor, with a mark for each placeholder."""
    config = CONFIGS[name]("tiny")
    if not config.marks_tiles:
        placeholders = IMAGE * (1 if config.padded_rows else shape.total)
        return f"<img>{placeholders}</img>" if name.startswith("internvl") else placeholders
    tokens = config.token_rule.count(1, 1).encoded // config.token_rule.count(1, 1).tiles
    grid = ((shape.total // tokens - 1) // shape.columns, shape.columns) if shape.columns else (0, 0)
    return str(get_image_prompt_string(*grid, tokens, "<fake_token_around_image>", IMAGE, "<global-img>"))
