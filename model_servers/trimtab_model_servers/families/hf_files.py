"""Small files of a transformers model folder, read with a bound in bytes."""

import json
from pathlib import Path
from typing import Any, Final

from trimtab_model_servers.errors import ModelError

MAX_BYTES: Final = 4 * 2**20
"""Bound of a file; a tokenizer's configuration lists its special tokens and may be large."""


def read_text(folder: Path, file: str) -> str | None:
    """Content of a file; None if it does not exist.

    Raises:
        ModelError: it is too large, or not UTF-8.
    """
    path = folder / file
    if not path.is_file():
        return None
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ModelError(f"{path} has {size} bytes; should be at most {MAX_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ModelError(f"{path} is not UTF-8: {error}") from error


def read_json(folder: Path, file: str) -> dict[str, Any]:
    """JSON object in a file; empty if the file does not exist.

    Raises:
        ModelError: it is too large, or not a JSON object.
    """
    text = read_text(folder, file)
    if text is None:
        return {}
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder / file} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{folder / file} holds {type(document).__name__}; should be an object")
    return document
