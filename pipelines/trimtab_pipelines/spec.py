"""`InferencePipeline`: the resource a user applies. Stages, one latency SLO, an objective and a budget."""

from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines import graph
from trimtab_pipelines.accuracy_evidence import AccuracyBasis
from trimtab_pipelines.chat_settings import ChatSettings
from trimtab_pipelines.families import fill_tensors
from trimtab_pipelines.flavors import ResourceFlavor, flavor_of
from trimtab_pipelines.quantity import Amount, Cores, Fraction, Seconds
from trimtab_pipelines.resource import ADVISORY_SUFFIX, Model, Name, Resource, find_named, is_empty, require_unique
from trimtab_pipelines.scheduling_policies import PolicyTraits, SchedulingPolicy, policy_traits
from trimtab_pipelines.stages import (
    EMBEDDINGS_INPUT,
    GENERATION_OUTPUTS,
    IMAGES_INPUT,
    MESSAGES_INPUT,
    PipelineOutput,
    Stage,
)
from trimtab_pipelines.tensors import RequestInput
from trimtab_pipelines.variants import Resources, Variant

MAX_OPTIONS = 8192
"""Number of options (variants × operating points × batch sizes) that a pipeline may have in total."""

MIN_DRAIN_SECONDS = 30.0
MAX_DRAIN_SECONDS = 600.0
"""Bounds of the drain time, whatever the SLO, so that node drains and rollouts finish."""


class Objective(Model):
    """Planning objective: a weighted sum, the best accuracy within the budget, or the lowest cost above a floor."""

    goal: Literal["Weighted", "MaxAccuracy", "MinCost"] = "Weighted"
    accuracy_weight: float = Field(default=10.0, ge=0)
    """Weight of pipeline accuracy (IPA's α)."""
    cost_weight: float = Field(default=0.5, ge=0)
    """Weight of a cost of 1 an hour: of one core (IPA's β), unless resource flavors set other prices."""
    batch_weight: float = Field(default=1e-6, ge=0)
    """Weight of one row of batch size (IPA's δ); breaks ties."""
    accuracy_metric: Literal["Product", "NormalizedRanks"] = "Product"
    """How stage accuracies are combined. Product (PAS) multiplies them. NormalizedRanks (PAS') adds their ranks, scaled
    to 0…1.
    """
    accuracy_basis: AccuracyBasis = "Expected"
    """Expected plans with each accuracy's value. LowerBound plans with the lower end of its confidence interval, if it
    has one.
    """
    accuracy_floor: Fraction | None = None
    """Minimum expected pipeline accuracy at the planned load, on average over the requests. Required by goal MinCost.
    A request sets its own floor by the parameter `trimtab.accuracy_floor`.
    """

    @model_validator(mode="after")
    def _floor_for_min_cost(self) -> Self:
        if self.goal == "MinCost" and self.accuracy_floor is None:
            raise ValueError("objective: goal MinCost needs accuracyFloor, for instance 0.9")
        return self


class Budget(Model):
    """Limits on what all replicas together may request."""

    cores: Cores = Field(gt=0)
    gpus: int = Field(default=0, ge=0)
    """Devices of all flavors."""
    cost_per_hour: Amount | None = Field(default=None, gt=0, exclude_if=lambda cost: cost is None)
    """Cost an hour of the planned replicas, at the prices of their flavors."""
    surge_cores: Cores = 0.0
    """Additional cores that may be requested while a rollout is in progress."""
    pool: Name | None = None
    """Name of a pool. Pipelines of one pool share its cores and GPUs and are planned together, each within its own
    budget.
    """


class Pool(Model):
    """Limits on what the pipelines whose `spec.budget.pool` names the pool may request together."""

    cores: Cores = Field(gt=0)
    gpus: int = Field(default=0, ge=0)
    namespaces: tuple[Name, ...] = ()
    """Namespaces whose pipelines may use the pool; all if empty."""
    max_gain: float = Field(default=20.0, gt=0)
    """Largest gain of its objective that one pipeline may claim from the pool. Larger claims, from its weights or its
    switching cost, are scaled down to this.
    """


class Pools(Model):
    """The pools of a cluster by name, as in the file given with `--pools`."""

    pools: dict[Name, Pool]


class ServiceLevel(Model):
    """Latency SLO."""

    latency_seconds: Seconds = Field(alias="latency", gt=0)
    """End-to-end latency target, from arrival to the complete response."""
    quantile: float = Field(default=0.99, gt=0, lt=1)
    """Quantile of requests that should meet the target."""
    time_to_first_token_seconds: Seconds | None = Field(
        default=None, alias="timeToFirstToken", gt=0, exclude_if=lambda seconds: seconds is None
    )
    """Target for the time from a chat's arrival to its first token (TTFT); used as its deadline in every queue.
    `latency` then bounds the complete response.
    """
    time_per_output_token_seconds: Seconds | None = Field(
        default=None, alias="timePerOutputToken", gt=0, exclude_if=lambda seconds: seconds is None
    )
    """Target for the mean time between two tokens of a response (TPOT)."""

    @property
    def first_response_seconds(self) -> float:
        """Time within which a response must begin; only a streamed response is incomplete by then."""
        return self.time_to_first_token_seconds or self.latency_seconds

    @property
    def drain_seconds(self) -> float:
        """Time for which a terminating router or replica waits for its in-flight requests."""
        return min(max(MIN_DRAIN_SECONDS, self.latency_seconds), MAX_DRAIN_SECONDS)

    @model_validator(mode="after")
    def _require_ttft_within_latency(self) -> Self:
        if self.first_response_seconds > self.latency_seconds:
            raise ValueError("slo.timeToFirstToken is longer than slo.latency, which bounds the whole response")
        return self


class Adaptation(Model):
    """Settings of the control loop that plans."""

    interval_seconds: Seconds = Field(default=10.0, alias="interval", ge=1)
    """Time between two planning decisions; at least 1s."""
    horizon_seconds: Seconds = Field(default=20.0, alias="horizon", gt=0)
    """How far ahead load is forecast."""
    forecaster: Literal["LSTM", "Reactive", "Oracle"] = "LSTM"
    headroom: float = Field(default=0.1, ge=0, le=10)
    """Capacity planned above the forecast, as a fraction of it."""
    target_utilization: float = Field(default=0.8, ge=0.1, le=1)
    """Fraction of a replica's measured throughput that is planned to be used in the busiest second of the forecast."""
    peak_wait: float | None = Field(default=None, gt=0, le=0.5, exclude_if=lambda share: share is None)
    """Share of the latency SLO for which rows of the busiest second may wait. If absent, capacity carries them."""
    switching_cost: float = Field(default=0.05, ge=0)
    """Minimum gain of the objective for each stage that a new plan changes. With goal MaxAccuracy it also applies to
    giving back a core.
    """
    scale_down_stabilization_seconds: Seconds = Field(default=20.0, alias="scaleDownStabilization")
    """Time after a load peak during which replicas are not scaled down."""
    demand_quantile: float | None = Field(default=None, ge=0.5, lt=1)
    """Quantile of the forecast peak to plan for, such as 0.9. The median is used if absent."""
    solver: Literal["Exact", "HiGHS", "Gurobi"] = "Exact"


class Queue(Model):
    """Bound of each stage's queue."""

    max_rows: int = Field(default=1024, ge=1, le=1_000_000)


MAX_ROUTERS = 8
"""Default of `router.maxReplicas`."""


class RouterSettings(Model):
    """Router pods in a cluster."""

    replicas: int = Field(default=1, ge=1, le=16)
    """Fewest routers."""
    max_replicas: int | None = Field(default=None, ge=1, le=64, exclude_if=lambda most: most is None)
    """Most routers that a plan may request; 8 if absent."""
    resources: Resources = Resources(cpu=0.1, memory=256 * 2**20)

    def clamp(self, routers: int) -> int:
        """The nearest allowed number of routers."""
        return min(max(routers, self.replicas), max(self.max_replicas or MAX_ROUTERS, self.replicas))

    @model_validator(mode="after")
    def _require_range(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"router.maxReplicas {self.max_replicas} is below router.replicas {self.replicas}")
        return self


class Rollout(Model):
    """Rollout of a plan in a cluster."""

    ready_timeout_seconds: Seconds = Field(default=300.0, alias="readyTimeout", gt=0)
    """Time after which a replica that is not ready counts as failed."""
    unschedulable_grace_seconds: Seconds = Field(default=10.0, alias="unschedulableGrace", ge=0)
    """Time for which a replica may be unschedulable before the plan is given up."""


class InferencePipelineSpec(Model):
    """A DAG of stages with one SLO, one objective and one budget."""

    mode: Literal["Auto", "Advisory", "Paused"] = "Auto"
    inputs: tuple[RequestInput, ...] = Field(default=(), min_length=1, max_length=16)
    """If absent, those that the stages' families declare."""
    outputs: tuple[PipelineOutput, ...] = Field(default=(), min_length=1, max_length=64)
    """If absent, all outputs of the stages that no other stage reads."""
    stages: tuple[Stage, ...] = Field(min_length=1, max_length=32)
    slo: ServiceLevel
    objective: Objective = Objective()
    budget: Budget
    flavors: tuple[ResourceFlavor, ...] = Field(default=(), max_length=64, exclude_if=is_empty)
    """Kinds of hardware, in addition to those of the cluster; one of the same name replaces the cluster's."""
    adaptation: Adaptation = Adaptation()
    drop_policy: Literal["Predicted", "Expired", "Never"] = "Predicted"
    """When queued requests are dropped. Predicted: when the predicted finish misses the deadline. Expired: when the
    deadline has passed. Never: requests are not dropped.
    """
    scheduling_policy: SchedulingPolicy | None = None
    """How batches are formed. If absent, TokenAdaptive for a pipeline with a stage whose replicas host several
    variants or whose engine has several operating points, else EarliestDeadlineFirst. EarliestDeadlineFirst: the most
    urgent rows at the planned operating point. SlackFit: the largest batch at the most accurate point that its most
    urgent row has time for. ModalityMix: the first batch of the best plan for the whole queue, which may split a
    request's rows over points. TokenAdaptive: the same by utility times accuracy, with batches that mix tasks.
    """
    queue: Queue = Queue()
    chat: ChatSettings | None = Field(default=None, exclude_if=lambda chat: chat is None)
    """Settings of the OpenAI chat endpoint, /v1/chat/completions. Requires an input messages BYTES [] and the outputs
    of a generation stage.
    """
    router: RouterSettings = RouterSettings()
    rollout: Rollout = Rollout()
    deployer: Literal["Deployment", "SeldonDeployment"] = "Deployment"
    """Kind of object that the operator creates for each replica group of a stage."""
    service_account_name: Name | None = None
    """ServiceAccount of the model server pods."""
    model_server_image: str | None = Field(
        default=None, min_length=1, max_length=1024, exclude_if=lambda image: image is None
    )
    """Image of the model servers, for example Trimtab's image extended with your own families. The operator's default
    is used if absent.
    """

    @property
    def policy_name(self) -> str:
        """The scheduling policy in effect."""
        return self.scheduling_policy or self.default_policy

    @cached_property
    def default_policy(self) -> str:
        chats = any(stage.serves_chats for stage in self.stages)
        mixes = any(stage.mixes_engine_points if chats else stage.mixes_variants for stage in self.stages)
        return "TokenAdaptive" if mixes else "EarliestDeadlineFirst"

    @property
    def policy_traits(self) -> PolicyTraits:
        return policy_traits(self.policy_name)

    @cached_property
    def chat_settings(self) -> ChatSettings | None:
        """Chat settings in effect; None if the pipeline does not serve chats."""
        has_messages = any((i.name, i.datatype, i.shape) == (MESSAGES_INPUT, "BYTES", ()) for i in self.inputs)
        generators = {stage.name for stage in self.stages if stage.generates}
        outputs = {output.name for output in self.outputs if output.source.partition(".")[0] in generators}
        serves_chats = has_messages and outputs >= {name for name, *_ in GENERATION_OUTPUTS}
        return (self.chat or ChatSettings()) if serves_chats else None

    @cached_property
    def ordered_stages(self) -> tuple[Stage, ...]:
        return graph.topological_order(self.stages)

    @cached_property
    def row_domains(self) -> dict[str, str]:
        """For each stage, the tensor whose rows it runs on: `request` or `STAGE.outputs.TENSOR`."""
        return graph.row_domains(self.inputs, self.ordered_stages)

    @cached_property
    def expected_rows(self) -> dict[str, float]:
        """Expected number of a stage's rows for each row of a request."""
        return graph.expected_rows(self.ordered_stages, self.row_domains)

    @property
    def flavor_limits(self) -> dict[str, float]:
        """Limits of the resource flavors that have one."""
        return {flavor.name: flavor.limit for flavor in self.flavors if flavor.limit is not None}

    @property
    def node_startup_seconds(self) -> float:
        """Longest time until a node of a variant's flavor is there."""
        return max(self.flavor(variant).node_startup_seconds for s in self.stages for variant in s.variants)

    def flavor(self, variant: Variant) -> ResourceFlavor:
        """The resource flavor of a variant's replicas; UserError lists the known flavors."""
        return flavor_of(self.flavors, variant)

    def stage(self, name: str) -> Stage:
        """Return a stage; KeyError lists the known stages."""
        return find_named(self.stages, name, "the pipeline has no stage")

    @model_validator(mode="before")
    @classmethod
    def _fill_tensors(cls, document: Any) -> Any:
        return fill_tensors(document) if isinstance(document, dict) else document

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.inputs:
            raise ValueError("inputs are missing; list those that the stages read from the request")
        require_unique((stage.name for stage in self.stages), "stages")
        require_unique((flavor.name for flavor in self.flavors), "flavors")
        require_unique((tensor.name for tensor in self.inputs), "inputs")
        require_unique((tensor.name for tensor in self.outputs), "outputs")
        graph.check_references(self.inputs, self.outputs, self.stages)
        graph.row_domains(self.inputs, graph.topological_order(self.stages))
        self._require_affordable()
        self._require_plannable()
        self._require_generation_stage()
        self._require_encoders()
        return self

    def _require_generation_stage(self) -> None:
        has_token_slo = self.slo.time_to_first_token_seconds or self.slo.time_per_output_token_seconds
        if has_token_slo and not any(stage.generates for stage in self.stages):
            raise ValueError("slo.timeToFirstToken and slo.timePerOutputToken require a stage of role Generate")
        if self.chat is not None and self.chat_settings is None:
            raise ValueError(
                "chat requires an input messages BYTES [] and the outputs text, finish_reason and usage of a stage of "
                "role Generate"
            )

    def _require_encoders(self) -> None:
        """Require that only the generation stage reads an encoder's embeddings, which are delivered once."""
        tensors = {f"{graph.REQUEST}.inputs.{tensor.name}": tensor for tensor in self.inputs}
        embeddings = {f"{stage.name}.outputs.{EMBEDDINGS_INPUT}" for stage in self.stages if stage.encodes}
        for stage in self.stages:
            for read in stage.inputs:
                images = tensors[read.source] if stage.encodes and read.name == IMAGES_INPUT else None
                if images is not None and (images.datatype, images.shape) != ("BYTES", (-1,)):
                    raise ValueError(f"stage {stage.name}: role Encode requires {read.source} to be BYTES [-1]")
                if (read.source in embeddings) != (stage.generates and read.name == EMBEDDINGS_INPUT):
                    raise ValueError(
                        f"stage {stage.name}: input {read.name} reads {read.source}. Only a generation stage may read "
                        f"an encoder's output, and its input must be named {EMBEDDINGS_INPUT}"
                    )
            if stage.chooses_encoder_placement:
                self._require_same_images(stage)
        if any(output.source in embeddings for output in self.outputs):
            raise ValueError(f"outputs: {EMBEDDINGS_INPUT} of an encoder stage cannot be an output of the pipeline")

    def _require_same_images(self, stage: Stage) -> None:
        """Require that a stage with both encoder placements reads its encoder's images and is its only reader."""
        sources = {read.name: read.source for read in stage.inputs}
        encoder = self.stage(graph.split_reference(sources[EMBEDDINGS_INPUT])[0])
        encoded = next(read.source for read in encoder.inputs if read.name == IMAGES_INPUT)
        if sources[IMAGES_INPUT] != encoded:
            raise ValueError(
                f"stage {stage.name}: {IMAGES_INPUT} reads {sources[IMAGES_INPUT]}, but {encoder.name} encodes "
                f"{encoded}. Both must read the same images"
            )
        others = [s.name for s in self.stages if s is not stage and encoder.name in graph.predecessors(s)]
        if others:
            raise ValueError(
                f"stage {stage.name} has variants with a colocated encoder, so {encoder.name} may run no replicas, but "
                f"stage {others[0]} reads it too"
            )

    @cached_property
    def encoders(self) -> dict[str, str]:
        """For each generation stage that may use a colocated or a disaggregated encoder, its encoder stage."""
        return {
            stage.name: graph.split_reference(read.source)[0]
            for stage in self.stages
            if stage.chooses_encoder_placement
            for read in stage.inputs
            if read.name == EMBEDDINGS_INPUT
        }

    def _require_plannable(self) -> None:
        options = {stage.name: stage.option_count for stage in self.stages}
        total, largest = sum(options.values()), max(options, key=lambda name: options[name])
        if total > MAX_OPTIONS:
            raise ValueError(
                f"stages: {total} options (variants × operatingPoints × batchSizes), {options[largest]} of them in "
                f"{largest}; at most {MAX_OPTIONS} are supported: list fewer batchSizes or operatingPoints"
            )

    def _require_affordable(self) -> None:
        optional = set(self.encoders.values())  # not needed by variants with a colocated encoder
        min_cores = sum(
            s.min_replicas * min(v.resources.cpu for v in s.variants) for s in self.stages if s.name not in optional
        )
        if min_cores > self.budget.cores + 1e-9:
            raise ValueError(
                f"budget.cores {self.budget.cores:g} cannot hold one set of the smallest replicas, "
                f"which needs {min_cores:g}; raise it or lower the variants' resources.cpu"
            )


class InferencePipeline(Resource):
    """InferencePipeline serves a pipeline of models within a latency SLO."""

    kind: Literal["InferencePipeline"] = "InferencePipeline"
    spec: InferencePipelineSpec

    @model_validator(mode="after")
    def _require_unreserved_name(self) -> Self:
        if self.metadata.name.endswith(ADVISORY_SUFFIX):
            raise ValueError(
                f"metadata.name {self.metadata.name!r} must not end in {ADVISORY_SUFFIX}, which is "
                "reserved for advisory PipelinePlans; choose another name"
            )
        return self

    @property
    def name(self) -> str:
        """The pipeline's name, which is also the model name that clients use."""
        return self.metadata.name
