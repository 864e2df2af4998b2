"""What a user asks for: an InferencePipeline of stages, one latency SLO, an objective and a budget."""

from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines import graph
from trimtab_pipelines.accuracy_evidence import AccuracyBasis
from trimtab_pipelines.chat_settings import ChatSettings
from trimtab_pipelines.quantity import Cores, Fraction, Seconds
from trimtab_pipelines.resource import ADVISORY_SUFFIX, Model, Name, Resource, require_unique
from trimtab_pipelines.stages import ANSWER, MESSAGES, PULLED, SHOWN, PipelineOutput, Stage
from trimtab_pipelines.tensors import RequestInput
from trimtab_pipelines.variants import Resources

MOST_ROWS = 64
"""The largest job that splits are computed for. A larger one goes in parts, and no batch of a split has more."""

MOST_OPTIONS = 8192
"""Ways to run its stages that a pipeline may have: what one decision can compare in its time."""

LEAST_DRAIN_SECONDS = 30.0
MOST_DRAIN_SECONDS = 600.0
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
    first_token_seconds: Seconds | None = Field(
        default=None,
        alias="firstToken",
        gt=0,
        exclude_if=lambda seconds: seconds is None,
        description="From arrival to the first piece of an answer that a stage writes: its deadline in every queue. "
        "`latency` is then of the whole answer",
    )
    per_token_seconds: Seconds | None = Field(
        default=None,
        alias="perToken",
        gt=0,
        exclude_if=lambda seconds: seconds is None,
        description="Between two tokens of such an answer, on average",
    )

    @property
    def start_seconds(self) -> float:
        """Within which an answer must begin; it is whole by then unless it is written piece by piece."""
        return self.first_token_seconds or self.latency_seconds

    @property
    def drain_seconds(self) -> float:
        """How long a router or a replica that was told to stop waits for answers under way: those promised by then."""
        return min(max(LEAST_DRAIN_SECONDS, self.latency_seconds), MOST_DRAIN_SECONDS)

    @model_validator(mode="after")
    def _first_before_last(self) -> Self:
        if self.start_seconds > self.latency_seconds:
            raise ValueError("slo.firstToken is longer than slo.latency, which is of the whole answer")
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
    departure_policy: Literal[
        "UrgentFirst",
        "SlackFit",
        "ModalityMix",
        "TokenAdaptive",
        "Mosel",
        "AllModalities",
        "Aggressive",
        "Random",
        "Otas",
        "PetsLike",
        "InfaasLike",
    ] = Field(
        default="UrgentFirst",
        description="How a batch leaves. UrgentFirst: the most urgent rows at the planned operating point. SlackFit: "
        "the largest batch at the most accurate point that its most urgent row still has time for. ModalityMix: what "
        "the best plan for all that waits says, which may split a request's rows over points. TokenAdaptive: what that "
        "plan says by utility times accuracy, batches mixed of all tasks. For comparison: Mosel and Otas, as their "
        "papers have them; AllModalities, the most accurate point; Aggressive, the fastest that reaches the floor; "
        "Random, faster in random order until nobody is late; PetsLike, in the order of arrival at the planned point; "
        "InfaasLike, in that order at the most accurate point that carries the load",
    )
    queue: Queue = Queue()
    chat: ChatSettings | None = Field(
        default=None,
        exclude_if=lambda chat: chat is None,
        description="How chats are taken at /v1/chat/completions, where the pipeline answers them: its request has an "
        "input messages BYTES [], and its outputs are those of a stage that writes",
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
    def falls_back(self) -> bool:
        """Whether batches may leave at other operating points of the variant than the planned one."""
        return self.departure_policy != "UrgentFirst"

    @property
    def looks_twice(self) -> bool:
        """Whether rows the model is not certain of may be answered again at another operating point."""
        return self.departure_policy in {"ModalityMix", "TokenAdaptive"}

    @property
    def most_batch_rows(self) -> int | None:
        """Rows of the largest batch that its departure policy sends; None where any size leaves."""
        return MOST_ROWS if self.departure_policy in {"ModalityMix", "Mosel", "Aggressive", "Random"} else None

    @cached_property
    def chats(self) -> ChatSettings | None:
        """How it takes chats; None where it is no pipeline that answers them."""
        asks = any((i.name, i.datatype, i.shape) == (MESSAGES, "BYTES", ()) for i in self.inputs)
        writers = {stage.name for stage in self.stages if stage.writes}
        answers = {output.name for output in self.outputs if output.source.partition(".")[0] in writers}
        return (self.chat or ChatSettings()) if asks and answers >= {name for name, *_ in ANSWER} else None

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
        self._require_writers()
        self._require_encoders()
        return self

    def _require_writers(self) -> None:
        tokens = self.slo.first_token_seconds or self.slo.per_token_seconds
        if tokens and not any(stage.writes for stage in self.stages):
            raise ValueError("slo.firstToken and slo.perToken are of answers that a stage writes; mark it writes: true")
        if self.chat is not None and self.chats is None:
            raise ValueError(
                "chat needs an input messages BYTES [] and the outputs text, finish_reason and usage of a stage that "
                "writes"
            )

    def _require_encoders(self) -> None:
        """Embeddings are given once, to who writes: nobody else may read where they are."""
        tensors = {f"{graph.REQUEST}.inputs.{each.name}": each for each in self.inputs}
        kept = {f"{stage.name}.outputs.{PULLED}" for stage in self.stages if stage.encodes}
        for stage in self.stages:
            for read in stage.inputs:
                shown = tensors[read.source] if stage.encodes and read.name == SHOWN else None
                if shown is not None and (shown.datatype, shown.shape) != ("BYTES", (-1,)):
                    raise ValueError(f"stage {stage.name} encodes, so {read.source} must be BYTES [-1]")
                if (read.source in kept) != (stage.writes and read.name == PULLED):
                    raise ValueError(
                        f"stage {stage.name}: {read.name} from {read.source}: what a stage that encodes gives is read "
                        f"by one that writes, as {PULLED}, and by nobody else"
                    )
            if stage.parts:
                self._require_one_choice(stage)
        if any(output.source in kept for output in self.outputs):
            raise ValueError(f"outputs: {PULLED} of a stage that encodes are not for callers")

    def _require_one_choice(self, stage: Stage) -> None:
        """Where one stage reads images either way, it must be of the same images, and nobody else may need them."""
        sources = {read.name: read.source for read in stage.inputs}
        encoder = self.stage(graph.split_reference(sources[PULLED])[0])
        shown = next(read.source for read in encoder.inputs if read.name == SHOWN)
        if sources[SHOWN] != shown:
            raise ValueError(
                f"stage {stage.name}: {SHOWN} from {sources[SHOWN]}: its {PULLED} are of {shown}; read the same images"
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
            if stage.parts
            for read in stage.inputs
            if read.name == PULLED
        }

    def _require_plannable(self) -> None:
        ways = {stage.name: stage.ways for stage in self.stages}
        total, largest = sum(ways.values()), max(ways, key=lambda name: ways[name])
        if total > MOST_OPTIONS:
            raise ValueError(
                f"stages: {total} ways to run them (variants × operatingPoints × batchSizes), of which {largest} has "
                f"{ways[largest]}; {MOST_OPTIONS} can be planned with: list fewer batchSizes or operatingPoints"
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
