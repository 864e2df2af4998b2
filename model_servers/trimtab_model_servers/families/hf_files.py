"""The small files of a folder that transformers wrote a model into: what they hold, bounded in bytes."""

import json
from pathlib import Path
from typing import Any, Final

from trimtab_model_servers.errors import ModelError

MOST_BYTES: Final = 4 * 2**20
"""A tokenizer's configuration lists its special tokens and may be large; more than this is none."""


def text_of(folder: Path, file: str) -> str | None:
    """What a file says; None where there is none.

    Raises:
        ModelError: it is too large, or no text.
    """
    path = folder / file
    if not path.is_file():
        return None
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ModelError(f"{path} has {size} bytes; should be at most {MOST_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ModelError(f"{path} is no UTF-8: {error}") from error


def json_of(folder: Path, file: str) -> dict[str, Any]:
    """The object that a file holds; empty where there is none.

    Raises:
        ModelError: it is too large, or no JSON object.
    """
    text = text_of(folder, file)
    if text is None:
        return {}
    try:
        read: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder / file} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise ModelError(f"{folder / file} holds {type(read).__name__}; should be an object")
    return read
