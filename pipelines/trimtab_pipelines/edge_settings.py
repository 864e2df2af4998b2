"""Edge settings: authentication, client limits and timeouts of the proxy in front of a router.

The command line reads them from a file; the chart renders them from its values `edge`. The router and the Envoy
configuration use the same document. It contains paths of secrets, never secrets.
"""

from pathlib import PurePath
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from trimtab_pipelines.quantity import Bytes, Seconds
from trimtab_pipelines.resource import Model, Name, is_empty

AccessLogField = Literal["user_agent", "authority", "forwarded_for", "tls_version", "certificate_subject"]
"""Access log fields that are off by default."""
Path = Annotated[str, Field(min_length=1, max_length=4096)]
HostName = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


class EdgeTls(Model):
    """Certificates of the proxy, as PEM files; files moved into their folder take effect within seconds.

    A mounted Secret is replaced this way. On a machine, move new files over the old ones (`mv`); in-place writes are
    not detected.
    """

    certificate: Path
    """The proxy's certificate chain."""
    key: Path
    """Private key, in the certificate's folder; both are watched."""
    client_ca: Path | None = None
    """Certificate authority of client certificates. If set, clients must present one."""

    @model_validator(mode="after")
    def _require_one_folder(self) -> Self:
        if PurePath(self.certificate).parent != PurePath(self.key).parent:
            raise ValueError("certificate and key must be in one folder, so that they are replaced together")
        return self


class ReplicaIdentity(Model):
    """Certificate for mutual TLS of routers and replicas, as PEM files; new files apply to later connections."""

    certificate: Path
    """Certificate chain."""
    key: Path
    """Private key, without a password."""
    ca: Path
    """Certificate authorities of the peer's certificate."""
    name: str = Field(default="", max_length=253, pattern=r"^[\x21-\x7e]*$")
    """DNS name or URI required in the peer's certificate; any certificate of the authority is accepted if empty."""


class JwtIssuer(Model):
    """An issuer of JSON Web Tokens."""

    issuer: str = Field(min_length=1, max_length=1024)
    """Required `iss` claim."""
    audiences: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1, max_length=16)
    """Accepted `aud` claims."""
    jwks: str = Field(pattern=r"^(/|https://).+")
    """The issuer's public keys: a file, or an https URL."""
    client_claim: str = Field(default="sub", pattern=r"^[A-Za-z0-9_]+$")
    """Claim that names the client."""
    pipelines_claim: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_]+$")
    """Claim with the list of pipelines that the client may call: `NAMESPACE/NAME`, `NAMESPACE/*`, or `*` for all.
    Without it each token may call all pipelines.
    """
    unprefixed_pipelines: bool = False
    """Whether a `NAME` alone matches the pipeline of that name in every namespace."""


class ClientLimits(Model):
    """Limits of one client at one router; 0 disables a limit.

    A client is the name of its key, the subject of its token, or else its address (over IPv6 its /64 network).
    """

    requests_per_second: float = Field(default=0.0, ge=0, le=1e6)
    burst: int = Field(default=0, ge=0)
    """Requests at once; 0 allows two seconds' worth."""
    concurrency: int = Field(default=0, ge=0)
    """Concurrent requests."""
    in_flight: Bytes = Field(default=0, ge=0)
    """Bytes of in-flight requests."""


class Timeouts(Model):
    """Client timeouts of the proxy."""

    headers_seconds: Seconds = Field(default=5.0, alias="headers", gt=0)
    body_seconds: Seconds = Field(default=15.0, alias="body", gt=0)
    """Timeout of the complete request."""
    idle_seconds: Seconds = Field(default=300.0, alias="idle", gt=0)
    """Timeout of a connection without requests."""
    connection_age_seconds: Seconds = Field(default=3600.0, alias="connectionAge", gt=0)
    """Age after which clients are asked to reconnect."""


class EdgeSettings(Model):
    """Settings of a proxy, and of connections from its router to replicas."""

    tls: EdgeTls | None = None
    replicas: ReplicaIdentity | None = None
    """Mutual TLS between routers and replicas."""
    keys_file: Path | None = None
    """File of hashed API keys, one `NAME: sha256:… [PIPELINE …]` per line."""
    keys_secret: Name | None = None
    """Secret in the pipeline's namespace whose entries are hashed API keys; in a cluster."""
    jwt: tuple[JwtIssuer, ...] = Field(default=(), max_length=8)
    hosts: tuple[HostName, ...] = Field(default=(), max_length=16, exclude_if=is_empty)
    """Host names, besides those of loopback, that requests to loopback without keys and TLS may name."""
    clients: ClientLimits = ClientLimits()
    timeouts: Timeouts = Timeouts()
    max_connections: int = Field(default=4096, ge=16, le=1_000_000)
    max_streams: int = Field(default=256, ge=1, le=65_536)
    """Concurrent streams on one HTTP/2 connection."""
    trusted_hops: int = Field(default=0, ge=0, le=16)
    """Number of proxies in front whose X-Forwarded-For is trusted."""
    access_log: Literal["Off", "Refused", "All"] = "Off"
    """Requests that are logged as a JSON line: none, unsuccessful ones, or all."""
    access_log_fields: tuple[AccessLogField, ...] = Field(default=(), max_length=len(get_args(AccessLogField)))
    """Additional client fields of the access log."""
    memory: Bytes = Field(default=256 * 2**20, ge=128 * 2**20)
    """Memory limit of the proxy."""

    @property
    def authenticates(self) -> bool:
        return bool(self.keys_file or self.keys_secret or self.jwt)

    @model_validator(mode="after")
    def _require_one_key_source(self) -> Self:
        if self.keys_file and self.keys_secret:
            raise ValueError("keysFile and keysSecret are mutually exclusive")
        return self

    @model_validator(mode="after")
    def _require_unique_issuers(self) -> Self:
        names = [issuer.issuer for issuer in self.jwt]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"jwt: duplicate issuer {', '.join(duplicates)}; list all its audiences in one entry")
        return self
