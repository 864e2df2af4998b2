"""What a file of weights must be, from wherever it is fetched: its suffix, its bounds, its digest."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trimtab_model_servers.errors import ModelError

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much and how long fetching may take, by the file; `patience_seconds` is how long nothing at all may come."""

    max_bytes: int = 8 * 2**30
    max_folder_bytes: int = 48 * 2**30
    connect_seconds: float = 5.0
    read_seconds: float = 30.0
    patience_seconds: float = 60.0
    total_seconds: float = 900.0


def require_size(size_bytes: int, limits: FetchLimits, name: str) -> None:
    """Raise ModelError where a file is larger than may be fetched."""
    if size_bytes > limits.max_bytes:
        raise ModelError(f"{name}: {size_bytes} bytes are more than the {limits.max_bytes} allowed for weights")


def sha256(path: Path) -> str:
    """The digest of a file, as `sha256:…`."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
