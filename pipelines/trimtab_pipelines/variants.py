"""The models a stage may run: where each comes from, what a replica asks for, and the points it can be run at."""

from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.accuracy_evidence import AccuracyEvidence, declared_accuracy
from trimtab_pipelines.operating_point import AccuracyByTask, OperatingPoint
from trimtab_pipelines.quantity import Bytes, Cores, Fraction
from trimtab_pipelines.resource import Model, Name, is_empty, require_unique
from trimtab_pipelines.tasks import MAX_TASKS, Task

ParameterValue = bool | int | float | str


class Resources(Model):
    """What one replica asks for. Fractions of a core are fine."""

    cpu: Cores = Field(default=1.0, gt=0)
    memory: Bytes = Field(default=512 * 2**20, gt=0)
    gpu: int = Field(default=0, ge=0)


class Toleration(Model):
    """A taint of a node that replicas put up with, as in a pod."""

    key: str | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = Field(default=None, ge=0)


OPEN_INFERENCE_READY = "/v2/health/ready"


class Container(Model):
    """A container of the user's own that serves the Open Inference Protocol V2 or OpenAI's chat API over HTTP."""

    image: str = Field(min_length=1, max_length=1024)
    command: tuple[str, ...] = Field(default=(), max_length=64)
    args: tuple[str, ...] = Field(default=(), max_length=256)
    env: dict[str, str] = Field(default_factory=dict)
    port: int = Field(default=8080, ge=1, le=65535, description="Port of its HTTP endpoint")
    protocol: Literal["OpenInference", "OpenAI"] = Field(
        default="OpenInference",
        exclude_if=lambda protocol: protocol == "OpenInference",
        description="OpenInference: the Open Inference Protocol V2. OpenAI: chats are streamed from "
        "/v1/chat/completions, as vLLM and SGLang serve them; for a generation stage whose variant has its own "
        "encoder",
    )
    model_name: str | None = Field(
        default=None, min_length=1, description="What it calls its model; else the variant's name"
    )
    ready_path: str = Field(default=OPEN_INFERENCE_READY, pattern=r"^/", description="Answers 200 once it can serve")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"

    @property
    def serves_chats(self) -> bool:
        """Whether it serves OpenAI chats instead of tensors."""
        return self.protocol == "OpenAI"

    @model_validator(mode="after")
    def _require_ready_path(self) -> Self:
        if self.serves_chats and self.ready_path == OPEN_INFERENCE_READY:
            raise ValueError(
                f"readyPath: {self.ready_path} is not served under protocol OpenAI; give its own, such as /health"
            )
        return self


class Variant(Model):
    """One model for the task of a stage."""

    name: Name
    family: str = Field(
        default="",
        max_length=128,
        description="Architecture the model server builds, such as torchvision/resnet18, or a class of yours, such as "
        "acme.models:Embedder; empty with a container",
    )
    parameters: dict[str, ParameterValue] = Field(default_factory=dict, description="Settings of the family")
    storage_uri: str = Field(
        default="",
        max_length=1024,
        description="Where the weights are: a path relative to this file, file://…, s3://bucket/key, "
        "hf://repository/file or random://?seed=N; for models of several files also s3://bucket/prefix or "
        "hf://repository; a commit behind the repository, hf://owner/name@commit, pins it",
    )
    secret_name: Name | None = Field(
        default=None, description="Secret with the credentials and the endpoint of an s3:// storageUri"
    )
    container: Container | None = Field(default=None, description="Serve with this container instead of our own")
    digest: str | None = Field(
        default=None, pattern=r"^sha256:[0-9a-f]{64}$", description="Refuse weights whose SHA-256 is another"
    )
    accuracy: Fraction
    accuracy_evidence: AccuracyEvidence = AccuracyEvidence()
    accuracy_by_task: AccuracyByTask = Field(
        default_factory=dict,
        max_length=MAX_TASKS,
        exclude_if=is_empty,
        description="Accuracy on single tasks, where it was measured",
    )
    tasks: tuple[Task, ...] = Field(
        default=(),
        max_length=MAX_TASKS,
        exclude_if=is_empty,
        description="Tasks beside those of the weights, for a family that takes some; every replica loads them",
    )
    resources: Resources = Resources()
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels of the nodes it may run on")
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=16)
    runtime_class_name: str | None = Field(default=None, description="RuntimeClass of its pods, such as nvidia")
    max_batch_size: int = Field(default=64, ge=1, le=4096, description="Rows one batch may hold")
    encoder: Literal["Colocated", "Disaggregated"] | None = Field(
        default=None,
        exclude_if=lambda encoder: encoder is None,
        description="Colocated: the variant encodes images itself; while the plan runs it, the encoder stage needs no "
        "replicas. Disaggregated: it pulls embeddings from the encoder stage. Follows the graph if absent",
    )
    operating_points: tuple[OperatingPoint, ...] = Field(
        default=(), max_length=32, description="Ways to run this variant; none listed means one, named default"
    )

    @property
    def colocated(self) -> bool:
        """Whether it encodes images itself in a stage that may also read them from an encoder stage."""
        return self.encoder == "Colocated"

    @cached_property
    def points(self) -> tuple[OperatingPoint, ...]:
        """The operating points, never empty."""
        if self.operating_points:
            return self.operating_points
        evidence = None if self.accuracy_evidence == AccuracyEvidence() else self.accuracy_evidence
        only = OperatingPoint(
            accuracy=self.accuracy, accuracy_evidence=evidence, accuracy_by_task=self.accuracy_by_task
        )
        return (only,)

    @property
    def storage_uris(self) -> tuple[str, ...]:
        """Where all that its replicas load is: weights, then tasks."""
        return (self.storage_uri, *(task.storage_uri for task in self.loaded_tasks))

    @property
    def loaded_tasks(self) -> tuple[Task, ...]:
        """Its tasks beside those of the weights, without those that were deleted."""
        return tuple(task for task in self.tasks if not task.removed)

    def point(self, name: str) -> OperatingPoint:
        """The operating point of that name; KeyError names the ones there are."""
        for point in self.points:
            if point.name == name:
                return point
        known = ", ".join(point.name for point in self.points)
        raise KeyError(f"variant {self.name} has no operating point {name!r}; it has: {known}")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        where = f"variant {self.name}"
        require_unique((point.name for point in self.operating_points), f"{where}: operatingPoints")
        require_unique((task.name for task in self.tasks), f"{where}: tasks")
        if self.container is None and not (self.family and self.storage_uri):
            raise ValueError(f"{where}: give family and storageUri, or a container")
        if self.container is not None and self.family:
            raise ValueError(f"{where}: give either a family or a container, not both")
        if self.container is not None and self.tasks:
            raise ValueError(f"{where}: tasks are for a family of ours; a container of yours loads its own")
        declared_accuracy(self.accuracy, self.accuracy_evidence)
        if self.operating_points and self.accuracy_by_task:
            raise ValueError(f"{where}: accuracyByTask belongs to each of its operatingPoints, not beside them")
        return self
