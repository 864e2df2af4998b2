"""Sources of weights: a local file or folder, an object store, the Hugging Face Hub, or a random seed.

Only safetensors files are read, never pickle, but by runtimes of MLServer. Downloads are bounded in size and time,
verified, and cached on disk (see `cache`) by their digest or the store's ETag.
"""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.files import CONFIG_FILE, DEFAULT_LIMITS, SUFFIX, FetchLimits, require_digest
from trimtab_model_servers.weights.hf_hub import fetch_from_hub, fetch_repository
from trimtab_pipelines.kubernetes_names import CREDENTIALS_PREFIX

KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CA_BUNDLE",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_ENDPOINT",
    "HF_TOKEN",
)
_FORMS = "a path, file://PATH, s3://BUCKET/KEY, hf://OWNER/NAME@COMMIT/FILE or random://?seed=N"


def take_credentials(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables in ``KEYS`` from a pod's Secret, and remove all prefixed variables from the environment.

    The pod's variables have a prefix, because a Secret may have any key: PYTHONPATH, LD_PRELOAD or HTTPS_PROXY as plain
    variables would change the server itself.
    """
    secret = {name: environment.pop(name) for name in list(environment) if name.startswith(CREDENTIALS_PREFIX)}
    environment.update({key: secret[CREDENTIALS_PREFIX + key] for key in KEYS if CREDENTIALS_PREFIX + key in secret})


@dataclass(frozen=True, slots=True)
class RandomSeed:
    """Random weights, for measuring latency."""

    value: int


def find_weights(storage_uri: str, digest: str | None, limits: FetchLimits = DEFAULT_LIMITS) -> Path | RandomSeed:
    """The local file of the weights, fetched if necessary, or the seed of random ones; raises ModelError."""
    parts = urlsplit(storage_uri)
    match parts.scheme:
        case "random":
            return _seed(storage_uri, parts.query)
        case "" | "file":
            path = _local(Path(unquote(parts.path) if parts.scheme else storage_uri))
        case "s3":
            from trimtab_model_servers.weights.object_store import fetch  # noqa: PLC0415  (imports its client)

            return fetch(parts.netloc, unquote(parts.path).lstrip("/"), digest, limits)
        case "hf":
            path = fetch_from_hub(parts.netloc + parts.path, limits)
        case _:
            raise ModelError(f"storageUri {storage_uri!r}: unknown scheme {parts.scheme!r}; write {_FORMS}")
    require_digest(path, digest, storage_uri)
    return path


def find_files(storage_uri: str, digest: str | None, limits: FetchLimits = DEFAULT_LIMITS) -> Path | RandomSeed:
    """As ``find_weights``, for code that reads files of any format: also a local file or folder, or an object."""
    parts = urlsplit(storage_uri)
    path = Path(unquote(parts.path) if parts.scheme else storage_uri)
    if parts.scheme in {"", "file"} and path.exists():
        if path.is_file():
            require_digest(path, digest, storage_uri)
        return path
    if parts.scheme == "s3" and path.suffix:
        from trimtab_model_servers.weights.object_store import fetch  # noqa: PLC0415  (imports its client)

        return fetch(parts.netloc, str(path).lstrip("/"), digest, limits, path.suffix)
    return find_weights(storage_uri, digest, limits)


def put_file(path: Path, bucket: str, key: str) -> bool:
    """Upload a file unless the object has its content; return whether it was sent. Raises ModelError."""
    from trimtab_model_servers.weights.object_store import put  # noqa: PLC0415  (imports its client)

    return put(path, bucket, key, DEFAULT_LIMITS)


def find_folder(storage_uri: str, digest: str | None, limits: FetchLimits = DEFAULT_LIMITS) -> Path | None:
    """The local folder of a model as transformers writes it, fetched if necessary; None if the URI names no folder.

    A folder is a path, s3://BUCKET/PREFIX or hf://OWNER/NAME@COMMIT, and has no digest. Raises ModelError.
    """
    parts = urlsplit(storage_uri)
    path, prefix = Path(unquote(parts.path) if parts.scheme else storage_uri), unquote(parts.path).strip("/")
    local = parts.scheme in {"", "file"} and (path / CONFIG_FILE).is_file()
    stored = parts.scheme == "s3" and not prefix.endswith(SUFFIX)
    if not local and not stored and not (parts.scheme == "hf" and prefix and "/" not in prefix):
        return None
    if digest is not None:
        raise ModelError(f"{storage_uri}: a digest is given, but this is a folder; a digest is of one file")
    if local:
        return path
    if stored:
        from trimtab_model_servers.weights.object_store import fetch_folder  # noqa: PLC0415  (imports its client)

        return fetch_folder(parts.netloc, prefix, limits)
    return fetch_repository(f"{parts.netloc}/{prefix}", limits)


def _seed(storage_uri: str, query: str) -> RandomSeed:
    seed = parse_qs(query).get("seed", ["0"])[-1]
    if not seed.isdecimal() or int(seed) >= 2**63:
        raise ModelError(f"storageUri {storage_uri!r}: the seed must be an integer of at least 0, as random://?seed=7")
    return RandomSeed(int(seed))


def _local(path: Path) -> Path:
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIX}"))
        if len(files) != 1:
            raise ModelError(f"{path}: expected one {SUFFIX} file in this folder, found {len(files)}; name the file")
        return files[0]
    if not path.is_file():
        raise ModelError(f"{path}: no such weights; correct storageUri, or put the {SUFFIX} file there")
    if path.suffix != SUFFIX:
        raise ModelError(f"{path}: only {SUFFIX} files are read; write it with safetensors.torch.save_file")
    return path
