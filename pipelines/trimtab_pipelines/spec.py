"""What a user asks for: an InferencePipeline of stages, one latency SLO, an objective and a budget."""

from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines import graph
from trimtab_pipelines.accuracy_evidence import AccuracyBasis
from trimtab_pipelines.chat_settings import ChatSettings
from trimtab_pipelines.quantity import Cores, Fraction, Seconds
from trimtab_pipelines.resource import ADVISORY_SUFFIX, Model, Name, Resource, require_unique
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
from trimtab_pipelines.variants import Resources

MAX_OPTIONS = 8192
"""Ways to run its stages that a pipeline may have: what one decision can compare in its time."""

MIN_DRAIN_SECONDS = 30.0
MAX_DRAIN_SECONDS = 600.0
"""No promise keeps a node from being drained, or a rollout from going on, for longer."""


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
    accuracy_basis: AccuracyBasis = Field(
        default="Expected",
        description="Plan with each accuracy's value, or with the lower end of its interval where one is given",
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
    time_to_first_token_seconds: Seconds | None = Field(
        default=None,
        alias="timeToFirstToken",
        gt=0,
        exclude_if=lambda seconds: seconds is None,
        description="From a chat's arrival to its first token (TTFT): its deadline in every queue. `latency` then "
        "bounds the whole response",
    )
    time_per_output_token_seconds: Seconds | None = Field(
        default=None,
        alias="timePerOutputToken",
        gt=0,
        exclude_if=lambda seconds: seconds is None,
        description="Mean time between two tokens of a response (TPOT)",
    )

    @property
    def first_response_seconds(self) -> float:
        """Time within which a response must begin; only a streamed response is incomplete by then."""
        return self.time_to_first_token_seconds or self.latency_seconds

    @property
    def drain_seconds(self) -> float:
        """How long a router or a replica that was told to stop waits for answers under way: those promised by then."""
        return min(max(MIN_DRAIN_SECONDS, self.latency_seconds), MAX_DRAIN_SECONDS)

    @model_validator(mode="after")
    def _require_ttft_within_latency(self) -> Self:
        if self.first_response_seconds > self.latency_seconds:
            raise ValueError("slo.timeToFirstToken is longer than slo.latency, which bounds the whole response")
        return self


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
    switching_cost: float = Field(
        default=0.05,
        ge=0,
        description="Objective a change must gain for each stage changed; where a core only breaks ties (MaxAccuracy), "
        "so does giving one back",
    )
    scale_down_stabilization_seconds: Seconds = Field(
        default=20.0, alias="scaleDownStabilization", description="Time after a peak before a scale-down"
    )
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
    drop_policy: Literal["Predicted", "Expired", "Never"] = Field(
        default="Predicted",
        description="Predicted: drop a request once its predicted finish misses its deadline. Expired: once its "
        "deadline has passed. Never: not at all",
    )
    scheduling_policy: SchedulingPolicy = Field(
        default="EarliestDeadlineFirst",
        description="How batches are formed. EarliestDeadlineFirst: the most urgent rows at the planned operating "
        "point. SlackFit: the largest batch at the most accurate point that its most urgent row has time for. "
        "ModalityMix: the first batch of the best plan for the whole queue, which may split a request's rows over "
        "points. TokenAdaptive: the same by utility times accuracy, with batches that mix tasks",
    )
    queue: Queue = Queue()
    chat: ChatSettings | None = Field(
        default=None,
        exclude_if=lambda chat: chat is None,
        description="How chats are taken at /v1/chat/completions, where the pipeline answers them: its request has an "
        "input messages BYTES [], and its outputs are those of a generation stage",
    )
    router: RouterSettings = RouterSettings()
    rollout: Rollout = Rollout()
    deployer: Literal["Deployment", "SeldonDeployment"] = Field(
        default="Deployment", description="What the operator writes for each hosting group of a stage"
    )
    service_account_name: Name | None = Field(default=None, description="Service account of the model servers")
    model_server_image: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        exclude_if=lambda image: image is None,
        description="Image of its model servers, built from Trimtab's own with families added; else the installed one",
    )

    @property
    def policy_traits(self) -> PolicyTraits:
        return policy_traits(self.scheduling_policy)

    @cached_property
    def chat_settings(self) -> ChatSettings | None:
        """How it takes chats; None where it is no pipeline that answers them."""
        asks = any((i.name, i.datatype, i.shape) == (MESSAGES_INPUT, "BYTES", ()) for i in self.inputs)
        writers = {stage.name for stage in self.stages if stage.generates}
        answers = {output.name for output in self.outputs if output.source.partition(".")[0] in writers}
        return (self.chat or ChatSettings()) if asks and answers >= {name for name, *_ in GENERATION_OUTPUTS} else None

    @cached_property
    def ordered_stages(self) -> tuple[Stage, ...]:
        """The stages in an order in which each comes after all it reads from."""
        return graph.topological_order(self.stages)

    @cached_property
    def row_domains(self) -> dict[str, str]:
        """For each stage the tensor whose rows it runs on: `request` or `STAGE.outputs.TENSOR`."""
        return graph.row_domains(self.inputs, self.ordered_stages)

    @cached_property
    def expected_rows(self) -> dict[str, float]:
        """Rows a stage is expected to run for each row of a request."""
        return graph.expected_rows(self.ordered_stages, self.row_domains)

    def stage(self, name: str) -> Stage:
        """The stage of that name; KeyError names the ones there are."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; the pipeline has: {', '.join(stage.name for stage in self.stages)}")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_unique((stage.name for stage in self.stages), "stages")
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
        tokens = self.slo.time_to_first_token_seconds or self.slo.time_per_output_token_seconds
        if tokens and not any(stage.generates for stage in self.stages):
            raise ValueError("slo.timeToFirstToken and slo.timePerOutputToken require a stage of role Generate")
        if self.chat is not None and self.chat_settings is None:
            raise ValueError(
                "chat requires an input messages BYTES [] and the outputs text, finish_reason and usage of a stage of "
                "role Generate"
            )

    def _require_encoders(self) -> None:
        """Require that only the generation stage reads an encoder's embeddings, which are delivered once."""
        tensors = {f"{graph.REQUEST}.inputs.{each.name}": each for each in self.inputs}
        kept = {f"{stage.name}.outputs.{EMBEDDINGS_INPUT}" for stage in self.stages if stage.encodes}
        for stage in self.stages:
            for read in stage.inputs:
                shown = tensors[read.source] if stage.encodes and read.name == IMAGES_INPUT else None
                if shown is not None and (shown.datatype, shown.shape) != ("BYTES", (-1,)):
                    raise ValueError(f"stage {stage.name}: role Encode requires {read.source} to be BYTES [-1]")
                if (read.source in kept) != (stage.generates and read.name == EMBEDDINGS_INPUT):
                    raise ValueError(
                        f"stage {stage.name}: input {read.name} reads {read.source}. Only a generation stage may read "
                        f"an encoder's output, and its input must be named {EMBEDDINGS_INPUT}"
                    )
            if stage.chooses_encoder_placement:
                self._require_same_images(stage)
        if any(output.source in kept for output in self.outputs):
            raise ValueError(f"outputs: {EMBEDDINGS_INPUT} of an encoder stage cannot be an output of the pipeline")

    def _require_same_images(self, stage: Stage) -> None:
        """Where one stage reads images either way, it must be of the same images, and nobody else may need them."""
        sources = {read.name: read.source for read in stage.inputs}
        encoder = self.stage(graph.split_reference(sources[EMBEDDINGS_INPUT])[0])
        shown = next(read.source for read in encoder.inputs if read.name == IMAGES_INPUT)
        if sources[IMAGES_INPUT] != shown:
            raise ValueError(
                f"stage {stage.name}: {IMAGES_INPUT} reads {sources[IMAGES_INPUT]}, but its {EMBEDDINGS_INPUT} encode "
                f"{shown}; read the same images"
            )
        others = [each.name for each in self.stages if each is not stage and encoder.name in graph.predecessors(each)]
        if others:
            raise ValueError(
                f"stage {stage.name} may do without {encoder.name}, which {others[0]} reads: leave out either"
            )

    @cached_property
    def encoders(self) -> dict[str, str]:
        """Of each stage that reads images itself or pulls them, as the plan has it, the stage that encodes them."""
        return {
            stage.name: graph.split_reference(read.source)[0]
            for stage in self.stages
            if stage.chooses_encoder_placement
            for read in stage.inputs
            if read.name == EMBEDDINGS_INPUT
        }

    def _require_plannable(self) -> None:
        ways = {stage.name: stage.option_count for stage in self.stages}
        total, largest = sum(ways.values()), max(ways, key=lambda name: ways[name])
        if total > MAX_OPTIONS:
            raise ValueError(
                f"stages: {total} ways to run them (variants × operatingPoints × batchSizes), of which {largest} has "
                f"{ways[largest]}; {MAX_OPTIONS} can be planned with: list fewer batchSizes or operatingPoints"
            )

    def _require_affordable(self) -> None:
        spared = set(self.encoders.values())  # by who is whole
        least = sum(
            s.min_replicas * min(v.resources.cpu for v in s.variants) for s in self.stages if s.name not in spared
        )
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
    def _require_unreserved_name(self) -> Self:
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
