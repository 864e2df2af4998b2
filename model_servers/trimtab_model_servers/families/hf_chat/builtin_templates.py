"""Chat templates of pretrained models in Jinja, and the prompts of their images.

A template writes each image as one mark, which is replaced by the image's prompt.
"""

from collections.abc import Sequence
from typing import Final

from trimtab_model_servers.chat.interfaces import EmbeddingShape

ImagePrompt = Sequence[str | int]
"""Prompt of an image: text, and numbers of placeholders."""

_IN_ORDER: Final = (
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
_IMAGES_FIRST: Final = (
    "{% set images = message['content'] | selectattr('type', 'equalto', 'image') | list %}"
    "{% for image in images %}{{ '<image>' }}{% endfor %}{% if images %}{{ '\\n' }}{% endif %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
)


def _chatml(turn: str) -> str:
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        f"{turn}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


LLAVA_ONEVISION: Final = _chatml(_IMAGES_FIRST)
INTERNVL: Final = _chatml(_IN_ORDER.replace("'<image>'", "'<IMG_CONTEXT>\\n'"))
LLAMA_VISION: Final = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    + _IN_ORDER.replace("<image>", "<|image|>")
    + "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
SMOLVLM: Final = (
    "{{ '<|im_start|>' }}{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}" + _IN_ORDER + "{{ '<end_of_utterance>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def plain(shape: EmbeddingShape) -> ImagePrompt:
    """Placeholders only (LLaVA-OneVision)."""
    return (shape.total,)


def bracketed(shape: EmbeddingShape) -> ImagePrompt:
    """Placeholders between two markers (InternVL)."""
    return ("<img>", shape.total, "</img>")


def single_placeholder(shape: EmbeddingShape) -> ImagePrompt:
    """One placeholder, whatever the number of rows, for cross-attention (Llama 3.2 Vision)."""
    del shape
    return (1,)


def tiled(shape: EmbeddingShape, tile_tokens: int) -> ImagePrompt:
    """Tiles marked by row and column, then a global view (SmolVLM); ValueError if no image has such a shape."""
    tiles, columns = shape.total // tile_tokens, shape.columns
    grid_rows, remainder = divmod(tiles - 1, columns) if columns else (0, tiles - 1)
    if shape.total % tile_tokens or remainder or (columns and not grid_rows):
        grid = f"{columns} columns of tiles" if columns else "one tile"
        raise ValueError(
            f"an image has {shape.total} rows in {grid}; should be {tile_tokens} for each tile and the global view"
        )
    edge, parts = "<fake_token_around_image>", list[str | int]()
    for row in range(1, grid_rows + 1):
        for column in range(1, columns + 1):
            parts += [f"{edge}<row_{row}_col_{column}>", tile_tokens]
        parts.append("\n")
    return (*parts, *(["\n"] if grid_rows else []), f"{edge}<global-img>", tile_tokens, edge)
