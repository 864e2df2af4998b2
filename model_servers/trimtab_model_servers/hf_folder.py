"""Files of a model folder as transformers writes it."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from trimtab_model_servers.download_limits import SUFFIX, FetchLimits
from trimtab_model_servers.errors import ModelError

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
SINGLE_FILE: Final = f"model{SUFFIX}"
INDEX_FILE: Final = f"{SINGLE_FILE}.index.json"
"""Index of the weight files; a model without it has only ``SINGLE_FILE``."""
GENERATION_FILE, TOKENIZER_CONFIG_FILE = "generation_config.json", "tokenizer_config.json"
PROCESSOR_FILE, TEMPLATE_FILE, OLD_TEMPLATE_FILE = "processor_config.json", "chat_template.jinja", "chat_template.json"
IMAGES_FILE: Final = "preprocessor_config.json"
OPTIONAL_FILES: Final = (
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    PROCESSOR_FILE,
    TEMPLATE_FILE,
    OLD_TEMPLATE_FILE,
    IMAGES_FILE,
)
"""Settings of generation, chat templates and image processing."""
MAX_FILES: Final = 256
_FILE_NAME: Final = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]*{re.escape(SUFFIX)}")


def referenced_files(index: bytes, name: str) -> tuple[str, ...]:
    """The weight files that an index lists, sorted.

    Raises:
        ModelError: the index is invalid, or lists too many files or others than safetensors files of its folder.
    """
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


def require_total(sizes_bytes: Iterable[int], limits: FetchLimits, name: str) -> None:
    """Raise ModelError if a folder is too large."""
    total = sum(sizes_bytes)
    if total > limits.max_folder_bytes:
        raise ModelError(f"{name}: its files have {total} bytes, above the {limits.max_folder_bytes} allowed")
