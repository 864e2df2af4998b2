"""How chats with published models are written: their templates in Jinja, and what stands around an image.

A template writes each image as one mark; what the mark stands for follows from how many rows the image has.
"""

from collections.abc import Sequence
from typing import Final

from trimtab_model_servers.chat.interfaces import Rows

Around = Sequence[str | int]
"""What an image is in a prompt: text, and runs of so many placeholders."""

_IN_ORDER: Final = (
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
_IMAGES_FIRST: Final = (
    "{% set shown = message['content'] | selectattr('type', 'equalto', 'image') | list %}"
    "{% for image in shown %}{{ '<image>' }}{% endfor %}{% if shown %}{{ '\\n' }}{% endif %}"
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


def plain(rows: Rows) -> Around:
    """Placeholders alone (LLaVA-OneVision)."""
    return (rows.total,)


def bracketed(rows: Rows) -> Around:
    """Placeholders between two marks (InternVL)."""
    return ("<img>", rows.total, "</img>")


def attended_apart(rows: Rows) -> Around:
    """One placeholder, however many rows are attended to from there on (Llama 3.2 Vision)."""
    del rows
    return (1,)


def in_tiles(rows: Rows, tile_tokens: int) -> Around:
    """Tile by tile, each with its row and column, and an overview last (SmolVLM).

    Raises:
        ValueError: no image has so many rows of embeddings in so many columns of tiles.
    """
    tiles, columns = rows.total // tile_tokens, rows.columns
    cut, left = divmod(tiles - 1, columns) if columns else (0, tiles - 1)
    if rows.total % tile_tokens or left or (columns and not cut):
        told = f"{columns} columns of tiles" if columns else "one piece"
        raise ValueError(f"an image of {rows.total} rows in {told}; should be {tile_tokens} a tile and an overview's")
    edge, around = "<fake_token_around_image>", list[str | int]()
    for row in range(1, cut + 1):
        for column in range(1, columns + 1):
            around += [f"{edge}<row_{row}_col_{column}>", tile_tokens]
        around.append("\n")
    return (*around, *(["\n"] if cut else []), f"{edge}<global-img>", tile_tokens, edge)
