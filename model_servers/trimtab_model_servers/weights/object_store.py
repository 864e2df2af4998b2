"""Weights in S3 or MinIO, configured by AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.

AWS_REGION, AWS_SESSION_TOKEN and AWS_CA_BUNDLE (trusted certificates) are supported too. If the store is unavailable,
slow or overloaded, the download is retried and resumed while data arrives now and then; rejected requests are not
retried.
"""

import hashlib
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.datatypes import Object
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights import files
from trimtab_model_servers.weights.cache import cached_file, linked_folder, private_folder, tenant
from trimtab_model_servers.weights.files import SUFFIX, FetchLimits
from trimtab_pipelines.errors import backoff

_DEFAULT_ENDPOINT = "https://s3.amazonaws.com"
_CHUNK_BYTES = 2**20
_DIGEST = "trimtab-digest"
"""Metadata of uploaded objects."""
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
_ADVICE = {
    "AccessDenied": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and what they may read",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "NoSuchBucket": "correct the bucket in storageUri",
    "NoSuchKey": "correct the key in storageUri",
    "PreconditionFailed": "it was replaced while it was fetched; fetch it again",
}
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "XMinioServerNotInitialized"}
)
_ABSENT_CODES = frozenset({"NoSuchKey", "AccessDenied"})
log = logging.getLogger(__name__)
Result = TypeVar("Result")


class AbsentError(ModelError):
    """The store has no such object, or denies access: without permission to list the bucket, it does not say which."""


class _TransientError(Exception):
    """A failure that a retry may resolve."""


def fetch(bucket: str, key: str, digest: str | None, limits: FetchLimits, suffix: str = SUFFIX) -> Path:
    """The local copy of an object, downloaded unless its content is cached; raises ModelError."""
    address = f"s3://{bucket}/{key}"
    if not bucket or not key.endswith(suffix):
        raise ModelError(f"storageUri {address}: write s3://BUCKET/KEY{suffix}")
    source = _Source(bucket, key, limits, digest)
    if digest is None:
        return source.local_copy()
    name = digest.replace(":", "-") + suffix
    if tenant():
        source.find()  # checks this tenant's access before a cached file is used
        name = f"{hashlib.sha256(tenant().encode()).hexdigest()[:16]}-{name}"
    return cached_file(name, lambda path: files.sha256(path) == digest, source.write, limits.total_seconds)


def put(path: Path, bucket: str, key: str, limits: FetchLimits) -> bool:
    """Upload a file with its digest unless the object has it; ModelError if the object has other content."""
    return _Source(bucket, key, limits, files.sha256(path)).put(path)


def fetch_folder(bucket: str, prefix: str, limits: FetchLimits) -> Path:
    """The local copy of a model's folder: configuration, tokenizer and weights; raises ModelError."""
    address = f"s3://{bucket}/{prefix}"

    def source(file: str) -> _Source:
        return _Source(bucket, f"{prefix}/{file}" if prefix else file, limits)

    sources = {files.CONFIG_FILE: source(files.CONFIG_FILE)}
    sources[files.CONFIG_FILE].find()
    index = source(files.INDEX_FILE)
    if index.exists():
        sources[files.INDEX_FILE] = index
        sources |= {file: source(file) for file in files.referenced_files(index.local_copy().read_bytes(), address)}
    else:
        sources[files.SINGLE_FILE] = source(files.SINGLE_FILE)
    sources |= {file: optional for file in files.OPTIONAL_FILES if (optional := source(file)).exists()}
    files.require_total((source.find().size or 0 for source in sources.values()), limits, address)
    return linked_folder({file: source.local_copy() for file, source in sources.items()})


class _Source:
    """One object of a store, with the clocks of its download."""

    def __init__(self, bucket: str, key: str, limits: FetchLimits, digest: str | None = None) -> None:
        self._address = f"s3://{bucket}/{key}"
        self._bucket, self._key = bucket, key
        self._digest = digest
        self._limits = limits
        self._client = _client(limits)
        self._object: Object | None = None
        self._reset_clocks()

    def _reset_clocks(self) -> None:
        self._last_data_at = time.monotonic()
        self._deadline = self._last_data_at + self._limits.total_seconds

    def find(self) -> Object:
        """Request the object's metadata; raises ModelError if it is unavailable or too large."""
        if self._object is None:
            self._object = self._retry(self._stat)
        files.require_size(self._object.size or 0, self._limits, self._address)
        return self._object

    def _stat(self) -> Object:
        with _errors(self._address, self._limits):
            return self._client.stat_object(self._bucket, self._key)

    def exists(self) -> bool:
        """Whether the object exists and is accessible; raises ModelError if the store is unavailable."""
        try:
            self.find()
        except AbsentError:
            return False
        return True

    def put(self, path: Path) -> bool:
        """Upload a file of this digest, unless it is there; return whether it was sent."""
        if self.exists():
            if (self.find().metadata or {}).get(f"x-amz-meta-{_DIGEST}") == self._digest:
                return False
            raise ModelError(f"{self._address} has other content; give another prefix, or delete it first")
        self._retry(lambda: self._put(path))
        return True

    def _put(self, path: Path) -> None:
        with _errors(self._address, self._limits):
            self._client.fput_object(self._bucket, self._key, str(path), metadata={_DIGEST: self._digest or ""})

    def local_copy(self) -> Path:
        """The local copy of the object's current content, fetched if necessary; raises ModelError."""
        identity = hashlib.sha256(f"{_endpoint()}|{self._address}|{self.find().etag}".encode()).hexdigest()
        name = f"content-{identity}{Path(self._key).suffix}"
        return cached_file(name, lambda _: True, self.write, self._limits.total_seconds, private_folder())

    def write(self, file: BinaryIO) -> None:
        """Download the object and verify its digest; the clocks start anew, since the caller may have waited."""
        self._reset_clocks()
        metadata = self.find()
        self._retry(lambda: self._write_rest(metadata, file))
        file.flush()
        files.require_digest(Path(file.name), self._digest, self._address)

    def _write_rest(self, metadata: Object, file: BinaryIO) -> None:
        """Append the rest of the content to a file, of the same version of the object."""
        received = file.seek(0, os.SEEK_END)
        same_version: dict[str, str | list[str] | tuple[str]] = {"If-Match": f'"{metadata.etag}"'}
        with _errors(self._address, self._limits):
            response = self._client.get_object(self._bucket, self._key, received, request_headers=same_version)
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            file.seek(0)  # the store ignored the offset
        size = metadata.size or 0
        try:
            while (offset := file.tell()) < size:
                with _errors(self._address, self._limits):
                    chunk = response.read1(min(_CHUNK_BYTES, size - offset))
                if not chunk:
                    raise _TransientError(f"the connection ended after {offset} of {size} bytes")
                self._require_time(f"only {offset} of {size} bytes arrived")
                file.write(chunk)
                if file.tell() > received:
                    received, self._last_data_at = file.tell(), time.monotonic()
        finally:
            response.close()
            response.release_conn()

    def _retry(self, call: Callable[[], Result]) -> Result:
        """Call until it succeeds; raises ModelError once no data has arrived for too long."""
        last_data_at = self._last_data_at
        pauses = backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                return call()
            except _TransientError as error:
                if self._last_data_at > last_data_at:
                    last_data_at = self._last_data_at
                    pauses = backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
                self._pause_or_fail(error, next(pauses))

    def _pause_or_fail(self, error: _TransientError, pause_seconds: float) -> None:
        self._require_time(str(error))
        stalled_seconds = time.monotonic() - self._last_data_at
        if stalled_seconds + pause_seconds > self._limits.stall_seconds:
            raise ModelError(
                f"{self._address} at {_endpoint()}: {error}; no data for {stalled_seconds:.0f} s; "
                "check AWS_ENDPOINT_URL, and whether the object store is up"
            ) from error
        log.warning("%s: %s; retrying in %.1f s", self._address, error, pause_seconds)
        time.sleep(pause_seconds)

    def _require_time(self, problem: str) -> None:
        if time.monotonic() > self._deadline:
            raise ModelError(
                f"{self._address} at {_endpoint()}: {problem} in {self._limits.total_seconds:g} s; "
                "is the object store overloaded?"
            )


def _client(limits: FetchLimits) -> Minio:
    parts = urlsplit(_endpoint())
    if parts.username or parts.password:
        raise ModelError("AWS_ENDPOINT_URL holds credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ModelError(f"AWS_ENDPOINT_URL is {_endpoint()!r}; set for instance http://minio:9000")
    bundle = os.environ.get("AWS_CA_BUNDLE") or None
    if bundle is not None and not Path(bundle).is_file():
        raise ModelError(f"AWS_CA_BUNDLE is {bundle!r}, but there is no such file")
    return Minio(
        parts.netloc,
        access_key=os.environ.get("AWS_ACCESS_KEY_ID"),
        secret_key=os.environ.get("AWS_SECRET_ACCESS_KEY"),
        session_token=os.environ.get("AWS_SESSION_TOKEN"),
        secure=parts.scheme == "https",
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=limits.connect_seconds, read=limits.read_seconds),
            retries=urllib3.Retry(total=0, raise_on_status=False),
            ca_certs=bundle,
            cert_reqs="CERT_REQUIRED",
        ),
    )


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL") or _DEFAULT_ENDPOINT


@contextmanager
def _errors(address: str, limits: FetchLimits) -> Iterator[None]:
    """Convert the client's exceptions to _TransientError, or to a ModelError with the address and advice."""
    try:
        yield
    except S3Error as error:
        if error.code in _TRANSIENT_CODES:
            raise _TransientError(f"{error.code}: {error.message}") from error
        advice = _ADVICE.get(str(error.code), "check the object store")
        error_class = AbsentError if error.code in _ABSENT_CODES else ModelError
        raise error_class(f"{address} at {_endpoint()}: {error.code}: {error.message}; {advice}") from error
    except (ServerError, InvalidResponseError) as error:
        raise _TransientError(f"{type(error).__name__}: {error}") from error
    except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, urllib3.exceptions.SSLError | ssl.SSLError):
            raise ModelError(f"{address} at {_endpoint()}: {reason}; set AWS_CA_BUNDLE to its certificates") from error
        raise _TransientError(
            f"{type(reason).__name__}: {reason} (waited up to {limits.connect_seconds:g} s to connect, "
            f"{limits.read_seconds:g} s for data)"
        ) from error
