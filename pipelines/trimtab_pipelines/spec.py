"""What a user asks for: an InferencePipeline of stages, variants, one latency SLO, an objective and a budget."""

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines import graph
from trimtab_pipelines.quantity import Bytes, Cores, Fraction, Seconds
from trimtab_pipelines.resource import ADVISORY_SUFFIX, Model, Name, Resource
from trimtab_pipelines.tensors import RequestInput, StageOutput, TensorName

Reference = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_-]+\.(inputs|outputs)\.[A-Za-z_][A-Za-z0-9_.-]*$",
        max_length=201,
        description="request.inputs.TENSOR or STAGE.outputs.TENSOR",
    ),
]
ParameterValue = bool | int | float | str
MOST_OPTIONS = 8192
"""Ways to run its stages that a pipeline may have: what one decision can compare in its time."""


class StageInput(Model):
    """Where a stage takes one of its tensors from."""

    name: TensorName
    source: Reference = Field(alias="from")
    optional: bool = Field(default=False, description="The stage runs without it where its source is absent")


class PipelineOutput(Model):
    """A tensor the client receives."""

    name: TensorName
    source: Reference = Field(alias="from")


class OperatingPoint(Model):
    """How a loaded variant runs one batch: the modalities it reads and the tokens it adds or merges."""

    name: Name = "default"
    modalities: tuple[TensorName, ...] = Field(
        default=(), max_length=16, description="Inputs it reads; empty means all"
    )
    token_delta: int = Field(default=0, description="Prompt tokens added (> 0) or tokens merged per layer (< 0)")
    accuracy: Fraction


class Resources(Model):
    """What one replica asks for. Fractions of a core are fine."""

    cpu: Cores = Field(default=1.0, gt=0)
    memory: Bytes = Field(default=512 * 2**20, gt=0)
    gpu: int = Field(default=0, ge=0)


class AccuracyEvidence(Model):
    """Where an accuracy comes from."""

    source: Literal["Measured", "Published", "Declared"] = "Declared"
    samples: int | None = Field(default=None, gt=0, description="Held-out samples behind the figure")
    low: Fraction | None = Field(default=None, description="Lower end of the 95 % interval")
    high: Fraction | None = Field(default=None, description="Upper end of the 95 % interval")


class Toleration(Model):
    """A taint of a node that replicas put up with, as in a pod."""

    key: str | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = Field(default=None, ge=0)


class Container(Model):
    """A container of the user's own that speaks the Open Inference Protocol V2 over HTTP."""

    image: str = Field(min_length=1, max_length=1024)
    command: tuple[str, ...] = Field(default=(), max_length=64)
    args: tuple[str, ...] = Field(default=(), max_length=256)
    env: dict[str, str] = Field(default_factory=dict)
    port: int = Field(default=8080, ge=1, le=65535, description="Port of its HTTP endpoint")
    model_name: str | None = Field(
        default=None, min_length=1, description="What it calls its model; else the variant's name"
    )
    ready_path: str = Field(default="/v2/health/ready", pattern=r"^/", description="Answers 200 once it can serve")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"


class Variant(Model):
    """One model for the task of a stage."""

    name: Name
    family: str = Field(
        default="",
        max_length=128,
        description="Architecture the model server builds, such as torchvision/resnet18; empty with a container",
    )
    parameters: dict[str, ParameterValue] = Field(default_factory=dict, description="Settings of the family")
    storage_uri: str = Field(
        default="",
        max_length=1024,
        description="Where the weights are: a path relative to this file, file://…, s3://bucket/key, hf://repository "
        "or random://?seed=N",
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
    resources: Resources = Resources()
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels of the nodes it may run on")
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=16)
    runtime_class_name: str | None = Field(default=None, description="RuntimeClass of its pods, such as nvidia")
    max_batch_size: int = Field(default=64, ge=1, le=4096, description="Rows one batch may hold")
    operating_points: tuple[OperatingPoint, ...] = Field(
        default=(), max_length=32, description="Ways to run this variant; none listed means one, named default"
    )

    @cached_property
    def points(self) -> tuple[OperatingPoint, ...]:
        """The operating points, never empty."""
        return self.operating_points or (OperatingPoint(accuracy=self.accuracy),)

    def point(self, name: str) -> OperatingPoint:
        """Return the operating point of that name; KeyError names the ones there are."""
        for point in self.points:
            if point.name == name:
                return point
        known = ", ".join(point.name for point in self.points)
        raise KeyError(f"variant {self.name} has no operating point {name!r}; it has: {known}")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        where = f"variant {self.name}"
        graph.require_unique((point.name for point in self.operating_points), f"{where}: operatingPoints")
        if self.container is None and not (self.family and self.storage_uri):
            raise ValueError(f"{where}: give family and storageUri, or a container")
        if self.container is not None and self.family:
            raise ValueError(f"{where}: give either a family or a container, not both")
        return self


class Pin(Model):
    """What the user holds fixed; a constraint of the program."""

    variant: Name | None = None
    operating_point: Name | None = None
    batch_size: int | None = Field(default=None, ge=1, le=4096)
    replicas: int | None = Field(default=None, ge=1, le=1000)


class Stage(Model):
    """One task, and the variants that can do it."""

    name: Name
    inputs: tuple[StageInput, ...] = Field(min_length=1, max_length=16)
    outputs: tuple[StageOutput, ...] = Field(min_length=1, max_length=16)
    variants: tuple[Variant, ...] = Field(min_length=1, max_length=64)
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64), min_length=1, max_length=32, description="Batch sizes worth planning with"
    )
    min_replicas: int = Field(default=1, ge=1, le=1000)
    max_replicas: int = Field(default=64, ge=1, le=1000)
    hosting: Literal["Shared", "Separate"] = Field(
        default="Shared",
        description="Shared: a replica loads all variants that ask for the same resources, so that a change between "
        "them starts nothing. Separate: one variant a replica",
    )
    repeatable: bool = Field(
        default=True,
        description="A batch whose replica was lost may run again elsewhere. False, for models with effects of "
        "their own: what may have run is not sent again but failed",
    )
    pin: Pin = Pin()

    @property
    def ways(self) -> int:
        """How many ways there are to run it: variants × operating points × batch sizes."""
        return len(self.batch_sizes) * sum(len(variant.points) for variant in self.variants)

    def variant(self, name: str) -> Variant:
        """Return the variant of that name; KeyError names the ones there are."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(f"stage {self.name} has no variant {name!r}; it has: {', '.join(v.name for v in self.variants)}")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        where = f"stage {self.name}"
        graph.require_unique((variant.name for variant in self.variants), f"{where}: variants")
        graph.require_unique((tensor.name for tensor in self.inputs), f"{where}: inputs")
        graph.require_unique((tensor.name for tensor in self.outputs), f"{where}: outputs")
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"{where}: minReplicas {self.min_replicas} is above maxReplicas {self.max_replicas}")
        graph.check_counts(self.name, self.outputs)
        if self.pin.variant is not None and self.pin.variant not in {v.name for v in self.variants}:
            known = ", ".join(variant.name for variant in self.variants)
            raise ValueError(f"{where}: pin.variant {self.pin.variant!r} is not one of its variants: {known}")
        return self


class Objective(Model):
    """What is wanted: a weighted sum, the best accuracy the budget buys, or the least cost above a floor."""

    goal: Literal["Weighted", "MaxAccuracy", "MinCost"] = "Weighted"
    accuracy_weight: float = Field(default=10.0, ge=0, description="α: worth of accuracy 1.0")
    cost_weight: float = Field(default=0.5, ge=0, description="β: price of one core")
    batch_weight: float = Field(default=1e-6, ge=0, description="δ: price of one row of batch size, a tie-breaker")
    accuracy_metric: Literal["Product", "NormalizedRanks"] = Field(
        default="Product",
        description="PAS, the product of the stages' accuracies, or PAS', the sum of their ranks scaled to 0…1",
    )
    accuracy_floor: Fraction | None = Field(default=None, description="Least pipeline accuracy; needed by MinCost")

    @model_validator(mode="after")
    def _floor_for_min_cost(self) -> Self:
        if self.goal == "MinCost" and self.accuracy_floor is None:
            raise ValueError("objective: goal MinCost needs accuracyFloor, for instance 0.9")
        return self


class Budget(Model):
    """What all replicas together may ask for."""

    cores: Cores = Field(gt=0)
    gpus: int = Field(default=0, ge=0)
    surge_cores: Cores = Field(default=0.0, description="Extra cores allowed while a change is under way")
    pool: Name | None = Field(
        default=None,
        description="Pipelines of one pool share its cores and GPUs and are planned together, within their budgets",
    )


class ServiceLevel(Model):
    """The promise to the client."""

    latency_seconds: Seconds = Field(alias="latency", gt=0, description="End to end, from arrival to answer")
    quantile: float = Field(default=0.99, gt=0, lt=1, description="Share of requests planned to keep it")


class Adaptation(Model):
    """How the slow loop behaves."""

    interval_seconds: Seconds = Field(
        default=10.0, alias="interval", ge=1, description="How often a plan is decided, 1s at the least"
    )
    horizon_seconds: Seconds = Field(default=20.0, alias="horizon", gt=0)
    forecaster: Literal["LSTM", "Reactive", "Oracle"] = "LSTM"
    headroom: float = Field(default=0.1, ge=0, le=10, description="Capacity planned above the forecast, as a fraction")
    target_utilization: float = Field(
        default=0.8,
        ge=0.1,
        le=1,
        description="Share of its measured throughput a replica is planned to use in the forecast's busiest second",
    )
    switching_cost: float = Field(default=0.05, ge=0, description="Objective a change must gain for each stage changed")
    hold_seconds: Seconds = Field(default=20.0, alias="hold", description="No scale-down sooner than this after a peak")
    demand_quantile: float | None = Field(
        default=None,
        ge=0.5,
        lt=1,
        description="Plan for this quantile of the forecast peak, such as 0.9; else its middle",
    )
    solver: Literal["Exact", "HiGHS", "Gurobi"] = "Exact"


class Queue(Model):
    """The bound of each stage's central queue."""

    max_rows: int = Field(default=1024, ge=1, le=1_000_000)


class RouterSettings(Model):
    """The pods that take the requests, in a cluster."""

    replicas: int = Field(default=1, ge=1, le=16)
    resources: Resources = Resources(cpu=0.1, memory=256 * 2**20)


class Rollout(Model):
    """How a cluster makes a plan true."""

    ready_timeout_seconds: Seconds = Field(
        default=300.0, alias="readyTimeout", gt=0, description="A replica not ready by then counts as failed"
    )
    unschedulable_grace_seconds: Seconds = Field(
        default=10.0, alias="unschedulableGrace", ge=0, description="How long a replica may wait for a node"
    )


class InferencePipelineSpec(Model):
    """A DAG of stages with one promise, one objective and one budget."""

    mode: Literal["Auto", "Advisory", "Paused"] = "Auto"
    inputs: tuple[RequestInput, ...] = Field(min_length=1, max_length=16)
    outputs: tuple[PipelineOutput, ...] = Field(min_length=1, max_length=64)
    stages: tuple[Stage, ...] = Field(min_length=1, max_length=32)
    slo: ServiceLevel
    objective: Objective = Objective()
    budget: Budget
    adaptation: Adaptation = Adaptation()
    drop_policy: Literal["Predicted", "Past", "Never"] = Field(
        default="Predicted",
        description="Drop a request once its predicted finish misses its deadline, once the deadline is past, or never",
    )
    departure_policy: Literal["UrgentFirst", "SlackFit"] = Field(
        default="UrgentFirst",
        description="How a batch leaves: the most urgent rows at the planned operating point, or the largest batch at "
        "the most accurate point that its most urgent row still has time for",
    )
    queue: Queue = Queue()
    router: RouterSettings = RouterSettings()
    rollout: Rollout = Rollout()
    deployer: Literal["Deployment", "SeldonDeployment"] = Field(
        default="Deployment", description="What the operator writes for each replica set"
    )
    service_account_name: Name | None = Field(default=None, description="Service account of the model servers")

    @cached_property
    def order(self) -> tuple[Stage, ...]:
        """The stages in an order in which each comes after all it reads from."""
        return graph.topological_order(self.stages)

    @cached_property
    def domains(self) -> dict[str, str]:
        """For each stage the tensor whose rows it runs on: `request` or `STAGE.outputs.TENSOR`."""
        return graph.row_domains(self.inputs, self.order)

    @cached_property
    def expected_rows(self) -> dict[str, float]:
        """Rows a stage is expected to run for each row of a request."""
        return graph.expected_rows(self.order, self.domains)

    def stage(self, name: str) -> Stage:
        """Return the stage of that name; KeyError names the ones there are."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; the pipeline has: {', '.join(stage.name for stage in self.stages)}")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        graph.require_unique((stage.name for stage in self.stages), "stages")
        graph.require_unique((tensor.name for tensor in self.inputs), "inputs")
        graph.require_unique((tensor.name for tensor in self.outputs), "outputs")
        graph.check_references(self.inputs, self.outputs, self.stages)
        graph.row_domains(self.inputs, graph.topological_order(self.stages))
        self._require_affordable()
        self._require_plannable()
        return self

    def _require_plannable(self) -> None:
        ways = {stage.name: stage.ways for stage in self.stages}
        total, largest = sum(ways.values()), max(ways, key=lambda name: ways[name])
        if total > MOST_OPTIONS:
            raise ValueError(
                f"stages: {total} ways to run them (variants × operatingPoints × batchSizes), of which {largest} has "
                f"{ways[largest]}; {MOST_OPTIONS} can be planned with: list fewer batchSizes or operatingPoints"
            )

    def _require_affordable(self) -> None:
        least = sum(s.min_replicas * min(v.resources.cpu for v in s.variants) for s in self.stages)
        if least > self.budget.cores + 1e-9:
            raise ValueError(
                f"budget.cores {self.budget.cores:g} cannot hold one set of the smallest replicas, "
                f"which needs {least:g}; raise it or lower the variants' resources.cpu"
            )


class InferencePipeline(Resource):
    """A pipeline as a user applies it."""

    kind: Literal["InferencePipeline"] = "InferencePipeline"
    spec: InferencePipelineSpec

    @model_validator(mode="after")
    def _named_unlike_advice(self) -> Self:
        if self.metadata.name.endswith(ADVISORY_SUFFIX):
            raise ValueError(
                f"metadata.name {self.metadata.name!r} must not end in {ADVISORY_SUFFIX}: so end the PipelinePlans "
                "that advise only; choose another name"
            )
        return self

    @property
    def name(self) -> str:
        """The pipeline's name, which is also the model name clients call."""
        return self.metadata.name
