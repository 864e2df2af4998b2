"""Where it runs: the replicas that whoever makes a plan true has brought up, for the router to use."""

from typing import Annotated, Literal

from pydantic import Field

from trimtab_pipelines.resource import Model, Name


class Endpoint(Model):
    """One replica: a model server process or pod that has the named variants loaded and warmed."""

    name: str = Field(min_length=1, description="Unique among the stage's replicas, such as locate-0")
    address: Annotated[str, Field(pattern=r"^[^\s/]+:[0-9]+$")] = Field(description="host:port of its data port")
    protocol: Literal["HTTP", "OpenAI"] = Field(
        default="HTTP",
        description="HTTP: Open Inference Protocol V2, binary tensors over HTTP/1.1. OpenAI: chats as its API has them",
    )
    ready_path: str | None = Field(
        default=None, pattern=r"^/", description="Where one that speaks OpenAI answers 200 once it can serve"
    )
    variants: tuple[Name, ...] = Field(min_length=1, description="Variants it can serve at once, without a restart")
    model_names: dict[Name, str] = Field(
        default_factory=dict,
        description="Variants that a server not of ours hosts, with the names it has for them",
    )
    draining: bool = Field(default=False, description="Gets no new batch; goes once its last one is answered")


class Endpoints(Model):
    """All replicas of a pipeline, by stage."""

    generation: int = Field(default=0, ge=0, description="Grows with every change")
    stages: dict[str, tuple[Endpoint, ...]] = Field(default_factory=dict)
