"""Chat templates as the models' publishers document them, rendered by transformers itself."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from trimtab_model_servers.families.published_chats import spelled_out
from trimtab_model_servers.families.published_shapes import SHAPES

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
    "llama-3.2-vision-11b": _LLAMA.replace("PARTS", _PARTS.replace("IMAGE", f"'{IMAGE}'")),
}


def by_template(name: str, messages: list[dict[str, Any]], rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """A chat as a tiny model's bytes, images of so many rows as their placeholders; and where each image begins."""
    shape = SHAPES[name]("tiny")
    renderer = PreTrainedTokenizerFast(tokenizer_object=spelled_out(320))
    rendered = renderer.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False)
    first, *others = str(rendered).split(IMAGE)
    ids, starts = list(first.encode()), []
    for count, words in zip(rows, others, strict=True):
        starts.append(len(ids))
        ids += [shape.image_id] * (1 if shape.most_rows else count)
        ids += words.encode()
    return ids, starts
