"""Chat templates as the publishers document them, rendered by transformers."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE, get_image_prompt_string

from trimtab_model_servers.chat.interfaces import EmbeddingShape
from trimtab_model_servers.families.hf_vlm.chat_tokenizer import byte_tokenizer
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS

IMAGE = "\ue000"
"""Stands for an image in a rendered chat."""
INTERLEAVED: list[list[dict[str, str]]] = [
    [
        {"type": "text", "text": "Before:"},
        {"type": "image"},
        {"type": "text", "text": "After:"},
        {"type": "image"},
        {"type": "text", "text": "What changed?"},
    ],
    [
        {"type": "image"},
        {"type": "text", "text": "Before:After:"},
        {"type": "image"},
        {"type": "text", "text": "What "},
        {"type": "text", "text": "changed?"},
    ],
]

_PARTS = (
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ IMAGE }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
_IMAGES_FIRST = (
    "{% set images = message['content'] | selectattr('type', 'equalto', 'image') | list %}"
    "{% for image in images %}<image>{% endfor %}{% if images %}{{ '\\n' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
)
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}PARTS{{ '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
_LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}PARTS{{ '<|eot_id|>' }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)
TEMPLATES = {
    "llava-onevision-7b": _CHATML.replace("PARTS", _IMAGES_FIRST.replace("<image>", IMAGE)),
    "internvl3-8b": _CHATML.replace("PARTS", _PARTS.replace("IMAGE", f"'<img>{IMAGE}</img>\\n'")),
    **dict.fromkeys(
        ("smolvlm-2.2b", "smolvlm2-2.2b", "smolvlm2-500m"), DEFAULT_CHAT_TEMPLATE.replace("<image>", IMAGE)
    ),
    "llama-3.2-vision-11b": _LLAMA.replace("PARTS", _PARTS.replace("IMAGE", f"'{IMAGE}'")),
}


def by_template(
    name: str, messages: list[dict[str, Any]], shapes: Sequence[EmbeddingShape]
) -> tuple[list[int], list[int]]:
    """Token ids of a chat by its template, byte by byte, and the start of each image."""
    config = CONFIGS[name]("tiny")
    renderer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(320))
    arguments: Any = {"chat_template": TEMPLATES[name], "tokenize": False, "add_generation_prompt": True}
    first, *others = str(renderer.apply_chat_template(messages, **arguments)).split(IMAGE)
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
        return IMAGE * (1 if config.padded_rows else shape.total)
    tokens = config.token_rule.count(1, 1).encoded // config.token_rule.count(1, 1).tiles
    grid = ((shape.total // tokens - 1) // shape.columns, shape.columns) if shape.columns else (0, 0)
    return str(get_image_prompt_string(*grid, tokens, "<fake_token_around_image>", IMAGE, "<global-img>"))
