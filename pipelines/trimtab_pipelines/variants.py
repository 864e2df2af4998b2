"""Variant of a stage: its weights, the resources of a replica, and its operating points."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.accuracy_evidence import AccuracyEvidence, declared_accuracy
from trimtab_pipelines.engines import ENGINES, OPEN_INFERENCE_READY, EngineName
from trimtab_pipelines.escalation import MAX_ESCALATIONS, Escalation
from trimtab_pipelines.operating_point import AccuracyByTask, OperatingPoint
from trimtab_pipelines.pod_template import PodTemplate
from trimtab_pipelines.quantity import Bytes, Cores, Fraction
from trimtab_pipelines.resource import Model, Name, find_named, is_empty, require_unique
from trimtab_pipelines.tasks import MAX_TASKS, Task

ParameterValue = bool | int | float | str


class Resources(Model):
    """Resources that one replica requests. CPU may be fractional."""

    cpu: Cores = Field(default=1.0, gt=0)
    memory: Bytes = Field(default=512 * 2**20, gt=0)
    gpu: int = Field(default=0, ge=0)


class Toleration(Model):
    """A node taint that replicas tolerate, as in a pod."""

    key: str | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = Field(default=None, ge=0)


EndpointUrl = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.-]+:[0-9]{1,5}$", max_length=300)]


class Container(Model):
    """A user-provided container that serves the Open Inference Protocol V2 or the OpenAI chat API over HTTP."""

    image: str = Field(default="", max_length=1024, exclude_if=is_empty)
    """Image of its pods; required in a cluster."""
    command: tuple[str, ...] = Field(default=(), max_length=64)
    """Command; on one machine it runs as a process, and $(PORT) is the port that it must listen on."""
    args: tuple[str, ...] = Field(default=(), max_length=256)
    env: dict[str, str] = Field(default_factory=dict)
    port: int = Field(default=8080, ge=1, le=65535)
    """Port of its HTTP endpoint."""
    engine: EngineName | None = Field(default=None, exclude_if=lambda engine: engine is None)
    """Kind of server. It sets the defaults of protocol and readyPath, and which fields the router adds to requests."""
    protocol: Literal["OpenInference", "OpenAI"] = Field(
        default="OpenInference", exclude_if=lambda protocol: protocol == "OpenInference"
    )
    """OpenInference: the Open Inference Protocol V2. OpenAI: chats are streamed from /v1/chat/completions, as vLLM and
    SGLang serve them; for a generation stage whose variant has its own encoder.
    """
    model_name: str | None = Field(default=None, min_length=1)
    """Name of the model in this server; the variant's name if absent."""
    ready_path: str = Field(default=OPEN_INFERENCE_READY, pattern=r"^/")
    """Path that returns 200 when the server is ready."""
    endpoints: tuple[EndpointUrl, ...] = Field(default=(), max_length=64, exclude_if=is_empty)
    """Addresses of servers that run already, such as http://10.0.0.5:8000, each used as one replica. Only `trimtab up`
    and `trimtab profile` use them.
    """
    api_key_env: str | None = Field(
        default=None, pattern=r"^[A-Z][A-Z0-9_]{0,100}_API_KEY$", exclude_if=lambda name: name is None
    )
    """Environment variable with the key of the endpoints, sent as Authorization: Bearer."""
    adapters: dict[Name, Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=dict, max_length=MAX_TASKS, exclude_if=is_empty
    )
    """LoRA adapters that the server has loaded: their model names in it, by task. A request that names the task is
    served with its adapter. For protocol OpenAI.
    """
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"

    @property
    def serves_chats(self) -> bool:
        return self.protocol == "OpenAI"

    @model_validator(mode="before")
    @classmethod
    def _set_defaults_of_engine(cls, fields: object) -> object:
        if not isinstance(fields, dict) or (kind := ENGINES.get(str(fields.get("engine")))) is None:
            return fields
        set_path = fields.get("readyPath", fields.get("ready_path", OPEN_INFERENCE_READY))
        path = kind.ready_path if set_path == OPEN_INFERENCE_READY else set_path  # the default of the API server
        others = {name: value for name, value in fields.items() if name != "ready_path"}
        return {"protocol": kind.protocol, **others, "readyPath": path}

    @model_validator(mode="after")
    def _require_protocol_of_engine(self) -> Self:
        if self.engine is not None and self.protocol != ENGINES[self.engine].protocol:
            raise ValueError(f"protocol: {self.engine} has protocol {ENGINES[self.engine].protocol}; remove protocol")
        return self

    @model_validator(mode="after")
    def _require_server(self) -> Self:
        if not (self.image or self.command or self.endpoints):
            raise ValueError("container: give image, command or endpoints")
        if self.api_key_env is not None and not self.endpoints:
            raise ValueError("apiKeyEnv: it is the key of endpoints; give endpoints")
        if self.adapters and not self.serves_chats:
            raise ValueError("adapters: they require protocol OpenAI")
        return self

    @model_validator(mode="after")
    def _require_ready_path(self) -> Self:
        if self.serves_chats and self.ready_path == OPEN_INFERENCE_READY:
            raise ValueError(
                f"readyPath: {self.ready_path} is not served with protocol OpenAI; set readyPath, for instance /health"
            )
        return self


class Variant(Model):
    """A model for the task of a stage."""

    name: Name
    family: str = Field(default="", max_length=128)
    """Architecture that the model server builds, such as hf/summarization, or your own class, such as
    acme.models:Embedder. Empty if a container or an implementation is given.
    """
    implementation: str = Field(
        default="", max_length=256, pattern=r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)+)?$", exclude_if=is_empty
    )
    """Runtime of MLServer that serves the variant instead of a family, such as mlserver_sklearn.SKLearnModel."""
    parameters: dict[str, ParameterValue] = Field(default_factory=dict)
    """Parameters of family or implementation. A value that begins with ./ or ../ is a path relative to this file."""
    storage_uri: str = Field(default="", max_length=1024)
    """Location of the weights: a path relative to this file, file://…, s3://bucket/key, hf://repository/file or
    random://?seed=N. Models of several files may also use s3://bucket/prefix or hf://repository. hf://owner/name@commit
    pins a commit.
    """
    secret_name: Name | None = None
    """Secret with the credentials and the endpoint of an s3:// storageUri."""
    container: Container | None = None
    """Serve with this container instead of Trimtab's model server."""
    digest: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    """SHA-256 that the weights must have."""
    accuracy: Fraction
    accuracy_evidence: AccuracyEvidence = AccuracyEvidence()
    accuracy_by_task: AccuracyByTask = Field(default_factory=dict, max_length=MAX_TASKS, exclude_if=is_empty)
    """Accuracy on individual tasks, if measured."""
    escalations: tuple[Escalation, ...] = Field(default=(), max_length=MAX_ESCALATIONS, exclude_if=is_empty)
    """Measured gains of escalating low-confidence rows. Requires the stage's confidence output."""
    tasks: tuple[Task, ...] = Field(default=(), max_length=MAX_TASKS, exclude_if=is_empty)
    """Tasks in addition to those of the weights, for families that support tasks. Every replica loads them."""
    resources: Resources = Resources()
    flavor: Name | None = Field(default=None, exclude_if=lambda flavor: flavor is None)
    """Resource flavor that the replicas run on; `default` if absent. A model for two flavors is two variants."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that the variant may run on."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=16)
    runtime_class_name: str | None = None
    """RuntimeClass of the pods, such as nvidia."""
    pod_template: PodTemplate | None = Field(default=None, exclude_if=lambda template: template is None)
    max_batch_size: int = Field(default=64, ge=1, le=4096)
    """Largest number of rows in one batch."""
    encoder: Literal["Colocated", "Disaggregated"] | None = Field(
        default=None, exclude_if=lambda encoder: encoder is None
    )
    """Colocated: the variant encodes images itself; while the plan runs it, the encoder stage needs no replicas.
    Disaggregated: it pulls embeddings from the encoder stage. Derived from the graph if absent.
    """
    operating_points: tuple[OperatingPoint, ...] = Field(default=(), max_length=32)
    """Configurations of this variant that can be chosen for each batch. If none is listed there is one, named default.
    """

    @property
    def served_family(self) -> str:
        """The family, or the implementation in its place."""
        return self.family or self.implementation

    @property
    def forwards_chats(self) -> bool:
        """Whether an engine with OpenAI's API serves it."""
        return self.container is not None and self.container.serves_chats

    @property
    def colocated(self) -> bool:
        """Whether the variant encodes images itself, in a stage that may also read an encoder stage."""
        return self.encoder == "Colocated"

    @cached_property
    def points(self) -> tuple[OperatingPoint, ...]:
        if self.operating_points:
            return self.operating_points
        evidence = None if self.accuracy_evidence == AccuracyEvidence() else self.accuracy_evidence
        only = OperatingPoint(
            accuracy=self.accuracy,
            accuracy_evidence=evidence,
            accuracy_by_task=self.accuracy_by_task,
            escalations=self.escalations,
        )
        return (only,)

    @property
    def storage_uris(self) -> tuple[str, ...]:
        """Locations of all that a replica loads: weights, then tasks."""
        return (self.storage_uri, *(task.storage_uri for task in self.loaded_tasks))

    @property
    def loaded_tasks(self) -> tuple[Task, ...]:
        """Tasks in addition to those of the weights, without removed ones."""
        return tuple(task for task in self.tasks if not task.removed)

    @property
    def adapters(self) -> Mapping[str, str]:
        """Names of a third-party engine's LoRA adapters, by task."""
        return self.container.adapters if self.container is not None else {}

    @property
    def task_names(self) -> frozenset[str]:
        """Names of the tasks in addition to those of the weights."""
        return frozenset(task.name for task in self.loaded_tasks).union(self.adapters)

    def point(self, name: str) -> OperatingPoint:
        """Return an operating point; KeyError lists the known points."""
        return find_named(self.points, name, f"variant {self.name} has no operating point")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        where = f"variant {self.name}"
        require_unique((point.name for point in self.operating_points), f"{where}: operatingPoints")
        require_unique((task.name for task in self.tasks), f"{where}: tasks")
        if self.container is None and not (self.served_family and self.storage_uri):
            raise ValueError(f"{where}: give storageUri and family or implementation, or a container")
        if sum(map(bool, (self.family, self.implementation, self.container))) > 1:
            raise ValueError(f"{where}: give one of family, implementation and container")
        if self.container is not None and self.tasks:
            raise ValueError(f"{where}: tasks require a family; a container loads its own tasks")
        declared_accuracy(self.accuracy, self.accuracy_evidence)
        own = "accuracyByTask" if self.accuracy_by_task else "escalations" if self.escalations else ""
        if self.operating_points and own:
            raise ValueError(f"{where}: set {own} in each of operatingPoints, not in the variant")
        return self
