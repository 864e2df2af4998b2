"""`Endpoints`: the replicas of a pipeline, as the operator or the local runtime publishes them to the router."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from trimtab_pipelines.engines import EngineName
from trimtab_pipelines.resource import Model, Name
from trimtab_pipelines.variants import Container


class Endpoint(Model):
    """One replica: a model server that has the listed variants loaded and warmed up."""

    name: str = Field(min_length=1)
    """Name, unique among the stage's replicas, such as locate-0."""
    address: Annotated[str, Field(pattern=r"^[^\s/]+:[0-9]+$")]
    """HOST:PORT of the data port."""
    protocol: Literal["HTTP", "OpenAI"] = "HTTP"
    """HTTP: Open Inference Protocol V2 with binary tensors over HTTP/1.1. OpenAI: the OpenAI chat API."""
    engine: EngineName | None = None
    """Kind of a third-party server, if known."""
    ready_path: str | None = Field(default=None, pattern=r"^/")
    """Path that returns 200 when the server is ready; for protocol OpenAI."""
    tls: Literal["Replicas", "Public", "Off"] = Field(default="Replicas", exclude_if=lambda tls: tls == "Replicas")
    """Replicas: mutual TLS if replicas have an identity. Public: a certificate of a public authority. Off: plain."""
    api_key_env: str | None = None
    """Environment variable of the router with the key of the server."""
    variants: tuple[Name, ...] = Field(min_length=1)
    """Variants that the replica serves without a restart."""
    model_names: dict[Name, str] = Field(default_factory=dict)
    """Names of the variants' models in a server other than Trimtab's."""
    draining: bool = False
    """Whether the replica gets no new batches and stops after its last one."""


def container_fields(containers: Mapping[str, Container]) -> dict[str, Any]:
    """Fields of the endpoint of a server that runs these containers' models, by variant."""
    chats = next((container for container in containers.values() if container.serves_chats), None)
    return {
        "model_names": {name: container.model_name or name for name, container in containers.items()},
        "protocol": "OpenAI" if chats else "HTTP",
        "engine": chats.engine if chats else None,
        "ready_path": chats.ready_path if chats else None,
    }


class Endpoints(Model):
    """All replicas of a pipeline, by stage."""

    generation: int = Field(default=0, ge=0)
    """Number of the version; increases with every change."""
    exit_codes: dict[str, int] | None = None
    """Exit codes of the last replicas that ended, by name, negative if a signal ended them; None without any."""
    stages: dict[str, tuple[Endpoint, ...]] = Field(default_factory=dict)
