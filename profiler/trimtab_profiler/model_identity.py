"""Identity of a measured model: family, parameters and weights."""

import hashlib
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from trimtab_pipelines.model_spec import resolve_uri
from trimtab_pipelines.profile import ModelIdentity
from trimtab_pipelines.variants import Variant


def model_identity(variant: Variant, pipeline_folder: Path) -> ModelIdentity:
    """Describe a variant; relative storage URIs start at the pipeline's folder."""
    return ModelIdentity(
        family=variant.family, parameters=variant.parameters, weights=_weights(variant, pipeline_folder)
    )


def _weights(variant: Variant, pipeline_folder: Path) -> str:
    if variant.container is not None:
        return variant.container.image
    if variant.digest is not None:
        return variant.digest
    parts = urlsplit(resolve_uri(variant.storage_uri, pipeline_folder))
    path = Path(url2pathname(parts.path))
    if parts.scheme not in {"", "file"} or not path.exists():
        return variant.storage_uri
    return f"sha256:{_digest(path)}"


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files with their names."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    folder_digest = hashlib.sha256()
    for part in sorted(file for file in path.rglob("*") if file.is_file()):
        folder_digest.update(f"{part.relative_to(path)} {_digest(part)}\n".encode())
    return folder_digest.hexdigest()
