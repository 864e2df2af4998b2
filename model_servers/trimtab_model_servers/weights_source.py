"""Where weights come from: a folder or file here, an object store, a hub, or a seed. Only safetensors, never pickle.

Everything fetched is bounded in size and time, verified, and kept (see `cache`) under its digest or under what the
object store calls its content, so that the next replica finds it on disk.
"""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from trimtab_model_servers.download_limits import SUFFIX, FetchLimits, sha256
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.hf_folder import CONFIG_FILE
from trimtab_model_servers.hf_hub import fetch_from_hub, fetch_repository

_FORMS = "a path, file://PATH, s3://BUCKET/KEY, hf://OWNER/NAME@COMMIT/FILE or random://?seed=N"


@dataclass(frozen=True, slots=True)
class RandomSeed:
    """Random weights: no file, a seed. For measuring latency, where the numbers do not matter."""

    value: int


def find_weights(storage_uri: str, digest: str | None, limits: FetchLimits | None = None) -> Path | RandomSeed:
    """The local file that holds the weights, fetched if need be, or the seed to make them from.

    Args:
        storage_uri: a path, or one of the forms the module docstring names.
        digest: `sha256:…` that the file must have, or None.
        limits: bounds of what is fetched.

    Raises:
        ModelError: naming the address and what would be right.
    """
    parts = urlsplit(storage_uri)
    match parts.scheme:
        case "random":
            return _seed(storage_uri, parts.query)
        case "" | "file":
            path = _local(Path(unquote(parts.path) if parts.scheme else storage_uri))
        case "s3":
            from trimtab_model_servers.object_store import fetch  # noqa: PLC0415  (its client only where it is used)

            return fetch(parts.netloc, unquote(parts.path).lstrip("/"), digest, limits or FetchLimits())
        case "hf":
            path = fetch_from_hub(parts.netloc + parts.path, limits or FetchLimits())
        case _:
            raise ModelError(f"storageUri {storage_uri!r}: unknown scheme {parts.scheme!r}; write {_FORMS}")
    require_digest(path, digest, storage_uri)
    return path


def find_folder(storage_uri: str, digest: str | None, limits: FetchLimits | None = None) -> Path | None:
    """The local folder that holds a model as transformers writes it, fetched if need be; None where none is meant.

    Args:
        storage_uri: a folder's path, or s3://BUCKET/PREFIX or hf://OWNER/NAME@COMMIT.
        digest: None; a folder has none.
        limits: bounds of what is fetched.

    Raises:
        ModelError: it cannot be fetched, or a digest is asked for.
    """
    parts = urlsplit(storage_uri)
    path, inner = Path(unquote(parts.path) if parts.scheme else storage_uri), unquote(parts.path).strip("/")
    local = parts.scheme in {"", "file"} and (path / CONFIG_FILE).is_file()
    stored = parts.scheme == "s3" and not inner.endswith(SUFFIX)
    if not local and not stored and not (parts.scheme == "hf" and inner and "/" not in inner):
        return None
    if digest is not None:
        raise ModelError(f"{storage_uri}: a digest is asked for, but this is a folder; a digest is of one file")
    if local:
        return path
    if stored:
        from trimtab_model_servers.object_store import fetch_folder  # noqa: PLC0415  (as above)

        return fetch_folder(parts.netloc, inner, limits or FetchLimits())
    return fetch_repository(f"{parts.netloc}/{inner}", limits or FetchLimits())


def require_digest(path: Path, digest: str | None, name: str) -> None:
    """Raise ModelError where a digest is asked for and the file has another."""
    if digest is not None:
        found = sha256(path)
        if found != digest:
            raise ModelError(f"{name}: the weights have digest {found}, but {digest} is asked for")


def _seed(storage_uri: str, query: str) -> RandomSeed:
    written = parse_qs(query).get("seed", ["0"])[-1]
    if not written.isdecimal() or int(written) >= 2**63:
        raise ModelError(f"storageUri {storage_uri!r}: the seed must be an integer of at least 0, as random://?seed=7")
    return RandomSeed(int(written))


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
