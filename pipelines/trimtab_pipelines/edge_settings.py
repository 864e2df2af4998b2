"""The door of a router as its owner sets it: who may come in, how much one client may take, how long anything may last.

The command line reads it from a file, the chart writes it from its values `edge`; the router and what starts Envoy
read the same document. Secrets are never in it, only where they are.
"""

from pathlib import PurePath
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from trimtab_pipelines.quantity import Bytes, Seconds
from trimtab_pipelines.resource import Model, Name

AccessLogField = Literal["user_agent", "authority", "forwarded_for", "tls_version", "certificate_subject"]
"""Fields of the access log that are there only where somebody asks for them."""
Path = Annotated[str, Field(min_length=1, max_length=4096)]


class EdgeTls(Model):
    """Certificates of the door, as PEM files; files moved into their folder are in force within seconds.

    A mounted Secret is replaced so; on a machine move new files over the old ones (`mv`), since what is written into a
    file in place is not noticed.
    """

    certificate: Path = Field(description="The door's certificate and what stands between it and its authority")
    key: Path = Field(description="The certificate's private key, in the certificate's folder, where both are watched")
    client_ca: Path | None = Field(
        default=None, description="Authority of callers' certificates; with it, who has none cannot connect"
    )

    @model_validator(mode="after")
    def _require_one_folder(self) -> Self:
        if PurePath(self.certificate).parent != PurePath(self.key).parent:
            raise ValueError("certificate and key: put both into one folder, so that a new pair is noticed as one")
        return self


class ReplicaIdentity(Model):
    """The certificate that routers and replicas show each other, as PEM files; both sides have the same or their own.

    New files are in force for connections made after they are there, however they came there.
    """

    certificate: Path = Field(description="Certificate and what stands between it and its authority")
    key: Path = Field(description="The certificate's private key, without a password")
    ca: Path = Field(description="Authorities of the other side's certificate")
    name: str = Field(
        default="",
        max_length=253,
        pattern=r"^[\x21-\x7e]*$",
        description="DNS name or URI that the other side's certificate must bear; without it any of the authority does",
    )


class JwtIssuer(Model):
    """One issuer of JSON Web Tokens that callers may show."""

    issuer: str = Field(min_length=1, max_length=1024, description="What the token's `iss` must be")
    audiences: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1, max_length=16, description="One of them must be in its `aud`"
    )
    jwks: str = Field(pattern=r"^(/|https://).+", description="The issuer's public keys: a file, or an https address")
    client_claim: str = Field(default="sub", pattern=r"^[A-Za-z0-9_]+$", description="The claim that names the client")
    pipelines_claim: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_]+$",
        description="A list of what the client may call: `NAMESPACE/NAME`, `NAMESPACE/*`, or `*` for all; without it "
        "each token may call all",
    )
    unprefixed_pipelines: bool = Field(
        default=False, description="Whether a `NAME` alone is the pipeline of that name in every namespace"
    )


class ClientLimits(Model):
    """What one client may take of one router; 0 sets no bound.

    A client is the name of its key, the subject of its token, or else its address.
    """

    requests_per_second: float = Field(default=0.0, ge=0, le=1e6)
    burst: int = Field(default=0, ge=0, description="Requests at once; 0 allows those of two seconds")
    concurrency: int = Field(default=0, ge=0, description="Requests under way")
    in_flight: Bytes = Field(default=0, ge=0, description="Bytes of requests under way")


class Timeouts(Model):
    """How long the door waits for a caller."""

    headers_seconds: Seconds = Field(default=5.0, alias="headers", gt=0)
    body_seconds: Seconds = Field(default=15.0, alias="body", gt=0, description="For the whole request")
    idle_seconds: Seconds = Field(default=300.0, alias="idle", gt=0, description="Of a connection without requests")
    connection_age_seconds: Seconds = Field(
        default=3600.0, alias="connectionAge", gt=0, description="After it callers are asked to connect anew"
    )


class EdgeSettings(Model):
    """Everything that can be said of a door, and of the way from its router on."""

    tls: EdgeTls | None = None
    replicas: ReplicaIdentity | None = Field(
        default=None, description="With it routers and replicas speak TLS alone, and only with who shows a certificate"
    )
    keys_file: Path | None = Field(
        default=None, description="Hashed API keys, one `NAME: sha256:… [PIPELINE …]` a line"
    )
    keys_secret: Name | None = Field(
        default=None, description="In a cluster: the Secret of the pipeline's namespace whose entries are hashed keys"
    )
    jwt: tuple[JwtIssuer, ...] = Field(default=(), max_length=8)
    clients: ClientLimits = ClientLimits()
    timeouts: Timeouts = Timeouts()
    max_connections: int = Field(default=4096, ge=16, le=1_000_000)
    max_streams: int = Field(default=256, ge=1, le=65_536, description="Calls at once on one HTTP/2 connection")
    trusted_hops: int = Field(
        default=0, ge=0, le=16, description="Proxies before the door whose X-Forwarded-For counts"
    )
    access_log: Literal["Off", "Refused", "All"] = Field(
        default="Off", description="Which requests get a JSON line: none, those that were not answered well, all"
    )
    access_log_fields: tuple[AccessLogField, ...] = Field(
        default=(), max_length=len(get_args(AccessLogField)), description="What else of a caller its lines tell"
    )
    memory: Bytes = Field(default=256 * 2**20, ge=128 * 2**20, description="Limit of the door's process")

    @property
    def authenticates(self) -> bool:
        """Whether callers must say who they are."""
        return bool(self.keys_file or self.keys_secret or self.jwt)

    @model_validator(mode="after")
    def _require_one_key_source(self) -> Self:
        if self.keys_file and self.keys_secret:
            raise ValueError("keysFile and keysSecret: name one source of keys, not both")
        return self

    @model_validator(mode="after")
    def _require_unique_issuers(self) -> Self:
        names = [issuer.issuer for issuer in self.jwt]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"jwt: issuer {', '.join(twice)} stands there twice; name all its audiences in one entry")
        return self
