"""Weights from S3 or MinIO, as the usual variables say: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.

AWS_REGION, AWS_SESSION_TOKEN and AWS_CA_BUNDLE (a file of certificates to trust) count too. A store that is away, slow
or overloaded is asked again, from where it left off, as long as now and then something comes; one that refuses is not.
"""

import hashlib
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.datatypes import Object
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from trimtab_model_servers.cache import kept, linked, own_folder, tenant
from trimtab_model_servers.download_limits import SUFFIX, FetchLimits, require_size, sha256
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.hf_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    OPTIONAL_FILES,
    SINGLE_FILE,
    TOKENIZER_FILE,
    referenced_files,
    require_total,
)
from trimtab_pipelines.backoff import backoff

_DEFAULT_ENDPOINT = "https://s3.amazonaws.com"
_CHUNK_BYTES = 2**20
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
_CURES = {
    "AccessDenied": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and what they may read",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "NoSuchBucket": "correct the bucket in storageUri",
    "NoSuchKey": "correct the key in storageUri",
    "PreconditionFailed": "it was replaced while it was fetched; fetch it anew",
}
_PASSING = frozenset(
    {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "XMinioServerNotInitialized"}
)
log = logging.getLogger(__name__)
Result = TypeVar("Result")


class AbsentError(ModelError):
    """The store answers, and has no such object."""


class DeniedError(ModelError):
    """The store answers, and gives no such object to who asks; who may not list a bucket is told so of absent ones."""


_KINDS: Mapping[str, type[ModelError]] = {"NoSuchKey": AbsentError, "AccessDenied": DeniedError}


class _PassingError(Exception):
    """It failed, but may succeed later."""


def fetch(bucket: str, key: str, digest: str | None, limits: FetchLimits) -> Path:
    """The local copy of an object, downloading it unless the cache has this very content.

    Raises:
        ModelError: wrong credentials, no such object, too large, too slow, another digest.
    """
    address = f"s3://{bucket}/{key}"
    if not bucket or not key.endswith(SUFFIX):
        raise ModelError(f"storageUri {address}: write s3://BUCKET/KEY{SUFFIX}")
    source = _Source(bucket, key, digest, limits)
    if digest is not None:
        name = digest.replace(":", "-") + SUFFIX
        if tenant():
            source.find()  # who may not read them there is not given them here
            name = f"{hashlib.sha256(tenant().encode()).hexdigest()[:16]}-{name}"
        return kept(name, lambda path: sha256(path) == digest, source.write, limits.total_seconds)
    return source.kept()


def fetch_folder(bucket: str, prefix: str, limits: FetchLimits) -> Path:
    """The local copy of a model's folder: its configuration, its tokenizer and the weights that its index names.

    Raises:
        ModelError: as of ``fetch``; or a file is not there, or all together are too large.
    """
    address = f"s3://{bucket}/{prefix}"

    def source(file: str) -> _Source:
        return _Source(bucket, f"{prefix}/{file}" if prefix else file, None, limits)

    sources = {file: source(file) for file in (CONFIG_FILE, TOKENIZER_FILE)}
    for one in sources.values():
        one.find()
    index = source(INDEX_FILE)
    if index.is_there():
        sources[INDEX_FILE] = index
        sources |= {file: source(file) for file in referenced_files(index.kept().read_bytes(), address)}
    else:
        sources[SINGLE_FILE] = source(SINGLE_FILE)
    sources |= {file: one for file in OPTIONAL_FILES if (one := source(file)).is_there()}
    require_total((one.find().size or 0 for one in sources.values()), limits, address)
    return linked({file: one.kept() for file, one in sources.items()})


class _Source:
    """One object of a store, from which nothing may come for only so long."""

    def __init__(self, bucket: str, key: str, digest: str | None, limits: FetchLimits) -> None:
        self._address = f"s3://{bucket}/{key}"
        self._bucket, self._key = bucket, key
        self._digest = digest
        self._limits = limits
        self._client = _client(limits)
        self._found: Object | None = None
        self._start_clocks()

    def _start_clocks(self) -> None:
        """Count from now how long nothing came, and how long all of it takes."""
        self._heard_at = time.monotonic()
        self._give_up_at = self._heard_at + self._limits.total_seconds

    def find(self) -> Object:
        """Ask what the object is like; raises ModelError where it is none that may be fetched."""
        if self._found is None:
            self._found = self._persist(self._described)
        require_size(self._found.size or 0, self._limits, self._address)
        return self._found

    def is_there(self) -> bool:
        """Whether the store gives it; raises ModelError where it cannot be asked, or it may not be fetched."""
        try:
            self.find()
        except (AbsentError, DeniedError):
            return False
        return True

    def kept(self) -> Path:
        """The local copy of the object as it is now, fetched if need be; raises ModelError."""
        identity = hashlib.sha256(f"{_endpoint()}|{self._address}|{self.find().etag}".encode()).hexdigest()
        name = f"content-{identity}{Path(self._key).suffix}"
        return kept(name, lambda _: True, self.write, self._limits.total_seconds, own_folder())

    def write(self, file: BinaryIO) -> None:
        """Write the whole object, checked by its digest where one is asked for; raises ModelError.

        Whoever fetches may have waited for another that did: that is not the store's silence.
        """
        self._start_clocks()
        found, sha = self.find(), hashlib.sha256()

        def write_rest() -> None:
            for chunk in self._chunks(found, file.tell()):
                file.write(chunk)
                sha.update(chunk)

        self._persist(write_rest)
        digest = f"sha256:{sha.hexdigest()}"
        if self._digest not in {None, digest}:
            raise ModelError(f"{self._address}: the weights have digest {digest}, but {self._digest} is asked for")

    def _persist(self, act: Callable[[], Result]) -> Result:
        """Try until it succeeds; raises ModelError once nothing has come for too long."""
        heard_at = self._heard_at
        pauses = backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                return act()
            except _PassingError as error:
                if self._heard_at > heard_at:
                    heard_at = self._heard_at
                    pauses = backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
                self._pause_or_give_up(error, next(pauses))

    def _described(self) -> Object:
        with _errors(self._address, self._limits):
            found = self._client.stat_object(self._bucket, self._key)
        self._heard_at = time.monotonic()
        return found

    def _chunks(self, found: Object, offset: int) -> Iterator[bytes]:
        """Yield what follows the first `offset` bytes, of the object as it was found and no other.

        Raises _PassingError where the connection ends before the object does.
        """
        with _errors(self._address, self._limits):
            response = self._client.get_object(
                self._bucket, self._key, offset, request_headers={"If-Match": f'"{found.etag}"'}
            )
        size = found.size or 0
        known = offset if response.status != HTTPStatus.PARTIAL_CONTENT else 0  # it sends what we have once more
        try:
            while offset < size:
                with _errors(self._address, self._limits):
                    chunk = response.read1(min(_CHUNK_BYTES, size - offset + known))
                if not chunk:
                    raise _PassingError(f"the connection ended after {offset} of {size} bytes")
                self._require_time(f"only {offset} of {size} bytes came")
                known, new = max(known - len(chunk), 0), chunk[known:]
                if new:
                    self._heard_at = time.monotonic()
                    offset += len(new)
                    yield new
        finally:
            response.close()
            response.release_conn()

    def _pause_or_give_up(self, error: _PassingError, pause_seconds: float) -> None:
        self._require_time(str(error))
        silent_seconds = time.monotonic() - self._heard_at
        if silent_seconds + pause_seconds > self._limits.patience_seconds:
            raise ModelError(
                f"{self._address} at {_endpoint()}: {error}; nothing came for {silent_seconds:.0f} s; "
                "check AWS_ENDPOINT_URL, and whether the object store is up"
            ) from error
        log.warning("%s: %s; again in %.1f s", self._address, error, pause_seconds)
        time.sleep(pause_seconds)

    def _require_time(self, what: str) -> None:
        if time.monotonic() > self._give_up_at:
            raise ModelError(
                f"{self._address} at {_endpoint()}: {what} in {self._limits.total_seconds:g} s; "
                "is the object store overloaded?"
            )


def _client(limits: FetchLimits) -> Minio:
    parts = urlsplit(_endpoint())
    if parts.username or parts.password:
        raise ModelError("AWS_ENDPOINT_URL holds credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ModelError(f"AWS_ENDPOINT_URL is {_endpoint()!r}; write for instance http://minio:9000")
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
    """Turn what the client raises into what may pass, or into one line that names the address and the cure."""
    try:
        yield
    except S3Error as error:
        if error.code in _PASSING:
            raise _PassingError(f"{error.code}: {error.message}") from error
        cure = _CURES.get(str(error.code), "check the object store")
        raise _KINDS.get(str(error.code), ModelError)(
            f"{address} at {_endpoint()}: {error.code}: {error.message}; {cure}"
        ) from error
    except (ServerError, InvalidResponseError) as error:
        raise _PassingError(f"{type(error).__name__}: {error}") from error
    except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, urllib3.exceptions.SSLError | ssl.SSLError):
            raise ModelError(f"{address} at {_endpoint()}: {reason}; name its certificates in AWS_CA_BUNDLE") from error
        raise _PassingError(
            f"{type(reason).__name__}: {reason} (waited up to {limits.connect_seconds:g} s to connect, "
            f"{limits.read_seconds:g} s for data)"
        ) from error
