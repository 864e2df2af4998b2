"""Requirements on fetched weights: suffix, size, time and digest."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trimtab_model_servers.errors import ModelError

SUFFIX = ".safetensors"


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


def require_size(size_bytes: int, limits: FetchLimits, name: str) -> None:
    """Raise ModelError if a file is too large."""
    if size_bytes > limits.max_bytes:
        raise ModelError(f"{name}: {size_bytes} bytes exceed the {limits.max_bytes} allowed for weights")


def sha256(path: Path) -> str:
    """The digest of a file, as `sha256:…`."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
