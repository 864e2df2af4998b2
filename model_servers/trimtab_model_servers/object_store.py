"""Weights from S3 or MinIO, as the usual variables say: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.store import SUFFIX, Limits, cache_folder, require_digest, sha256

_DEFAULT_ENDPOINT = "https://s3.amazonaws.com"
_CHUNK_BYTES = 2**20
_CURES = {
    "AccessDenied": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and what they may read",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "NoSuchBucket": "correct the bucket in storageUri",
    "NoSuchKey": "correct the key in storageUri",
}


def fetch(bucket: str, key: str, digest: str | None, limits: Limits) -> Path:
    """Return the local copy of an object, downloading it unless the cache has this very content.

    Raises:
        ModelError: wrong credentials, no such object, too large, too slow, another digest.
    """
    address = f"s3://{bucket}/{key}"
    if not bucket or not key.endswith(SUFFIX):
        raise ModelError(f"storageUri {address}: write s3://BUCKET/KEY{SUFFIX}")
    if digest is not None:
        kept = cache_folder() / f"{digest.replace(':', '-')}{SUFFIX}"
        if kept.is_file() and sha256(kept) == digest:
            return kept
    with _errors(address, limits):
        client = _client(limits)
        facts = client.stat_object(bucket, key)
        size = int(facts.size or 0)
        if size > limits.max_bytes:
            raise ModelError(f"{address}: {size} bytes are more than the {limits.max_bytes} allowed for weights")
        if digest is None:
            identity = hashlib.sha256(f"{_endpoint()}|{address}|{facts.etag}".encode()).hexdigest()
            kept = cache_folder() / f"content-{identity}{SUFFIX}"
            if kept.is_file():
                return kept
        return _download(client, bucket, key, digest, kept, limits)


def _download(client: Minio, bucket: str, key: str, digest: str | None, kept: Path, limits: Limits) -> Path:  # noqa: PLR0913, PLR0917
    kept.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=kept.parent, prefix=".fetching-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in _chunks(client, bucket, key, limits):
                file.write(chunk)
        require_digest(temporary, digest, f"s3://{bucket}/{key}")
        temporary.replace(kept)
    finally:
        temporary.unlink(missing_ok=True)
    return kept


def _chunks(client: Minio, bucket: str, key: str, limits: Limits) -> Iterator[bytes]:
    """Yield the object's bytes; raise ModelError where they are too many or come too slowly."""
    deadline = monotonic() + limits.total_seconds
    received = 0
    response = client.get_object(bucket, key)
    try:
        for chunk in response.stream(_CHUNK_BYTES):
            received += len(chunk)
            if received > limits.max_bytes:
                raise ModelError(f"s3://{bucket}/{key}: more than the {limits.max_bytes} bytes allowed for weights")
            if monotonic() > deadline:
                raise ModelError(
                    f"s3://{bucket}/{key}: only {received} bytes came in {limits.total_seconds:g} s; "
                    "is the object store overloaded?"
                )
            yield chunk
    finally:
        response.close()
        response.release_conn()


def _client(limits: Limits) -> Minio:
    parts = urlsplit(_endpoint())
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ModelError(f"AWS_ENDPOINT_URL is {_endpoint()!r}; write for instance http://minio:9000")
    return Minio(
        parts.netloc,
        access_key=os.environ.get("AWS_ACCESS_KEY_ID"),
        secret_key=os.environ.get("AWS_SECRET_ACCESS_KEY"),
        session_token=os.environ.get("AWS_SESSION_TOKEN"),
        secure=parts.scheme == "https",
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=limits.connect_seconds, read=limits.read_seconds),
            retries=urllib3.Retry(total=2, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504]),
        ),
    )


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL") or _DEFAULT_ENDPOINT


@contextmanager
def _errors(address: str, limits: Limits) -> Iterator[None]:
    """Turn what the client raises into one line that names the address and the cure."""
    try:
        yield
    except S3Error as error:
        cure = _CURES.get(str(error.code), "check the object store")
        raise ModelError(f"{address} at {_endpoint()}: {error.code}: {error.message}; {cure}") from error
    except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
        raise ModelError(
            f"{address} at {_endpoint()}: {type(error).__name__}: {error} (waited up to {limits.connect_seconds:g} s "
            f"to connect, {limits.read_seconds:g} s for data); check AWS_ENDPOINT_URL"
        ) from error
