"""Weight files: suffix, bounds, digest, and the files of a model folder as transformers writes it."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trimtab_model_servers.errors import ModelError

SUFFIX = ".safetensors"
CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
SINGLE_FILE: Final = f"model{SUFFIX}"
INDEX_FILE: Final = f"{SINGLE_FILE}.index.json"
"""Index of the weight files; a model without it has only ``SINGLE_FILE``."""
GENERATION_FILE, TOKENIZER_CONFIG_FILE = "generation_config.json", "tokenizer_config.json"
PROCESSOR_FILE, TEMPLATE_FILE, OLD_TEMPLATE_FILE = "processor_config.json", "chat_template.jinja", "chat_template.json"
IMAGES_FILE: Final = "preprocessor_config.json"
TOKENIZER_FILES: Final = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "source.spm",
    "target.spm",
)
"""Files of fast and slow tokenizers; an image model has none."""
OPTIONAL_FILES: Final = (
    *TOKENIZER_FILES,
    GENERATION_FILE,
    PROCESSOR_FILE,
    TEMPLATE_FILE,
    OLD_TEMPLATE_FILE,
    IMAGES_FILE,
)
"""Tokenizer, and settings of generation, chat templates and image processing."""
MAX_FILES: Final = 256
_FILE_NAME: Final = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]*{re.escape(SUFFIX)}")
MAX_BYTES: Final = 4 * 2**20
"""Bound of a file; a tokenizer's configuration lists its special tokens and may be large."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of a download, per file unless named otherwise."""

    max_bytes: int = 8 * 2**30
    max_folder_bytes: int = 48 * 2**30
    connect_seconds: float = 5.0
    read_seconds: float = 30.0
    stall_seconds: float = 60.0
    """Time without any data before a download fails."""
    total_seconds: float = 900.0


DEFAULT_LIMITS = FetchLimits()


def require_size(size_bytes: int, limits: FetchLimits, name: str) -> None:
    if size_bytes > limits.max_bytes:
        raise ModelError(f"{name}: {size_bytes} bytes exceed the {limits.max_bytes} allowed for weights")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def require_digest(path: Path, digest: str | None, name: str) -> None:
    if digest is not None and (actual := sha256(path)) != digest:
        raise ModelError(f"{name}: the weights have digest {actual}, but {digest} is required")


def referenced_files(index: bytes, name: str) -> tuple[str, ...]:
    """The weight files of an index, sorted; ModelError if it is invalid, or lists too many or other files."""
    try:
        document: Any = json.loads(index)
        files = sorted({str(file) for file in document["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{name}: {INDEX_FILE} is not an index of weights: {type(error).__name__}: {error}") from error
    if not 0 < len(files) <= MAX_FILES:
        raise ModelError(f"{name}: {INDEX_FILE} lists {len(files)} files; should be 1 to {MAX_FILES}")
    for file in files:
        if not _FILE_NAME.fullmatch(file):
            raise ModelError(f"{name}: {INDEX_FILE} lists {file!r}; should be {SUFFIX} files of its folder")
    return tuple(files)


def folder_files(folder: Path) -> list[Path]:
    """The files of a model's folder that a replica reads, the configuration last; ModelError if one is missing."""
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder}: no {CONFIG_FILE} in this folder; name the weights' file in storageUri")
    index = read_text(folder, INDEX_FILE)
    weights = (SINGLE_FILE,) if index is None else (*referenced_files(index.encode(), str(folder)), INDEX_FILE)
    if missing := [name for name in weights if not (folder / name).is_file()]:
        raise ModelError(f"{folder}: {missing[0]} is missing; only {SUFFIX} files are read")
    optional = [name for name in OPTIONAL_FILES if (folder / name).is_file()]
    return [folder / name for name in (*weights, *optional, CONFIG_FILE)]


def require_total(sizes_bytes: Iterable[int], limits: FetchLimits, name: str) -> None:
    total = sum(sizes_bytes)
    if total > limits.max_folder_bytes:
        raise ModelError(f"{name}: its files have {total} bytes, above the {limits.max_folder_bytes} allowed")


def read_text(folder: Path, file: str) -> str | None:
    """Content of a file; None if it does not exist; raises ModelError if it is too large or not UTF-8."""
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
    """JSON object in a file, empty if the file does not exist; ModelError if it is too large or no object."""
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
