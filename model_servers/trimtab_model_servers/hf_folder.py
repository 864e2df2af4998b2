"""Which files a folder has that transformers wrote a model into, wherever it lies. Pure."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from trimtab_model_servers.download_limits import SUFFIX, FetchLimits
from trimtab_model_servers.errors import ModelError

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
SINGLE_FILE: Final = f"model{SUFFIX}"
INDEX_FILE: Final = f"{SINGLE_FILE}.index.json"
"""Names the files that hold the weights, where they are several; else they are ``SINGLE_FILE``."""
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
"""Say how a model ends its answers, how chats with it are written and images prepared; not every folder has them."""
MOST_FILES: Final = 256
_PLAIN: Final = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]*{re.escape(SUFFIX)}")


def referenced_files(index: bytes, name: str) -> tuple[str, ...]:
    """The files that an index names, sorted.

    Raises:
        ModelError: it names none, too many, or what is no safetensors file beside it.
    """
    try:
        read: Any = json.loads(index)
        files = sorted({str(file) for file in read["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{name}: {INDEX_FILE} is no index of weights: {type(error).__name__}: {error}") from error
    if not 0 < len(files) <= MOST_FILES:
        raise ModelError(f"{name}: {INDEX_FILE} names {len(files)} files; should be 1 to {MOST_FILES}")
    for file in files:
        if not _PLAIN.fullmatch(file):
            raise ModelError(f"{name}: {INDEX_FILE} names {file!r}; should be {SUFFIX} files beside it")
    return tuple(files)


def require_total(sizes_bytes: Iterable[int], limits: FetchLimits, name: str) -> None:
    """Raise ModelError where a folder's files together are more than may be fetched."""
    total = sum(sizes_bytes)
    if total > limits.max_folder_bytes:
        raise ModelError(f"{name}: its files have {total} bytes, more than the {limits.max_folder_bytes} allowed")
