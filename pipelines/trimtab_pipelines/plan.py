"""What should run: per stage the variant, batch size, replicas and operating points, with the reasons for it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.accuracy_evidence import AccuracyBasis
from trimtab_pipelines.escalation import MAX_ESCALATIONS, EscalationPlan
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.quantity import Cores, Fraction
from trimtab_pipelines.resource import Model, Name, Resource, is_empty, require_unique
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tensors import TensorName

_BY_TASK = "Accuracy on single tasks, where it is known"
_READS = "Inputs its batches take along, besides those the stage cannot run without; empty means all"
_SECONDS = "Expected seconds to serve a batch, by its rows"
_LOOKS = "Second looks the router may take at the least certain rows it has served at this point"


class PointPlan(Model):
    """An operating point that a stage may run."""

    name: Name
    accuracy: Fraction = Field(description="Accuracy of the variant at this point")
    accuracy_by_task: dict[Name, Fraction] = Field(default_factory=dict, exclude_if=is_empty, description=_BY_TASK)
    inputs: tuple[TensorName, ...] = Field(default=(), max_length=16, exclude_if=is_empty, description=_READS)
    service_seconds: dict[int, float] = Field(default_factory=dict, description=_SECONDS)
    escalations: tuple[EscalationPlan, ...] = Field(
        default=(), max_length=MAX_ESCALATIONS, exclude_if=is_empty, description=_LOOKS
    )


class StagePlan(Model):
    """What one stage should run, and what that is expected to give."""

    name: Name
    variant: Name
    batch_size: int = Field(ge=1, description="Most rows in one batch")
    replicas: int = Field(
        ge=0, description="0: nothing goes to it, since the stage that would read what it gives reads images itself"
    )
    operating_point: Name = "default"
    upgrades: tuple[PointPlan, ...] = Field(
        default=(),
        max_length=32,
        exclude_if=is_empty,
        description="More accurate points the router may run, best first: while there is time, or where one asks",
    )
    fallbacks: tuple[PointPlan, ...] = Field(
        default=(), max_length=32, description="Faster points the router may run when slack runs out, best first"
    )
    cores: Cores = Field(default=1.0, description="Cores of one replica")
    accuracy: Fraction = Field(description="Accuracy of the variant at its operating point")
    accuracy_by_task: dict[Name, Fraction] = Field(default_factory=dict, exclude_if=is_empty, description=_BY_TASK)
    inputs: tuple[TensorName, ...] = Field(default=(), max_length=16, exclude_if=is_empty, description=_READS)
    service_seconds: dict[int, float] = Field(default_factory=dict, description=_SECONDS)
    escalations: tuple[EscalationPlan, ...] = Field(
        default=(), max_length=MAX_ESCALATIONS, exclude_if=is_empty, description=_LOOKS
    )
    prompt_tokens: float = Field(
        default=0.0,
        ge=0,
        exclude_if=lambda tokens: not tokens,
        description="Of the prompts that serviceSeconds are of, on average, where the stage writes",
    )
    prefill_seconds: dict[int, float] = Field(
        default_factory=dict,
        max_length=32,
        exclude_if=is_empty,
        description="Expected seconds until the answer to a prompt begins, by its tokens, where the stage writes",
    )
    throughput_rps: float = Field(
        default=0.0, ge=0, description="Rows per second all replicas can serve, at the fastest point allowed"
    )
    latency_seconds: float = Field(default=0.0, ge=0, description="Planned queueing and service time of the stage")
    planned_escalation: EscalationPlan | None = Field(
        default=None,
        exclude_if=lambda look: look is None,
        description="The second look that capacity and accuracy were planned with, where there is one",
    )
    shadow_price: float = Field(
        default=0.0,
        ge=0,
        exclude_if=lambda price: not price,
        description="Expected right answers that a second of a replica is worth to those yet to come, as profiled",
    )
    shadow_price_at_rps: float = Field(
        default=0.0,
        ge=0,
        exclude_if=lambda load: not load,
        description="Rows a second that time is priced for; the router prices it anew by how long batches take there",
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_fallback_names(cls, given: object) -> object:
        """Read older plans, which listed fallbacks by name and never had any."""
        if isinstance(given, dict) and not given.get("fallbackOperatingPoints", True):
            return {key: value for key, value in given.items() if key != "fallbackOperatingPoints"}
        return given

    @property
    def planned(self) -> PointPlan:
        """The operating point that capacity and accuracy were planned with."""
        return PointPlan(
            name=self.operating_point,
            accuracy=self.accuracy,
            accuracy_by_task=self.accuracy_by_task,
            inputs=self.inputs,
            service_seconds=self.service_seconds,
            escalations=self.escalations,
        )

    @property
    def expected_accuracy(self) -> float:
        """What its answers are planned to have, the second look included."""
        return self.accuracy if self.planned_escalation is None else self.planned_escalation.accuracy

    @property
    def points(self) -> tuple[PointPlan, ...]:
        """Every operating point the router may run, preferred first."""
        return (*self.upgrades, self.planned, *self.fallbacks)

    @model_validator(mode="after")
    def _unique_points(self) -> Self:
        require_unique((point.name for point in self.points), f"stage {self.name}: operating points")
        return self


def unmeasured_point_plan(point: OperatingPoint, basis: AccuracyBasis = "Expected") -> PointPlan:
    """What a plan says of an operating point whose seconds are not known."""
    return PointPlan(
        name=point.name,
        accuracy=point.measured_accuracy().on(basis),
        accuracy_by_task=point.accuracies_by_task(basis),
        inputs=point.modalities,
        escalations=point.planned_escalations(basis),
    )


def initial_stage_plan(stage: Stage) -> StagePlan:
    """What a stage runs where nothing is planned: its first variant, row by row."""
    variant = stage.variants[0]
    point = unmeasured_point_plan(variant.points[0])
    return StagePlan(
        name=stage.name,
        variant=variant.name,
        batch_size=1,
        replicas=1,
        operating_point=point.name,
        accuracy=point.accuracy,
        accuracy_by_task=point.accuracy_by_task,
        inputs=point.inputs,
    )


class ForecastRecord(Model):
    """The load a plan stood on."""

    peak_rps: float = Field(ge=0, description="Requests per second planned for")
    quantile: float | None = Field(
        default=None, ge=0, le=1, description="Which quantile of the peak it is; none means the forecast's middle"
    )
    observed_rps: float = Field(default=0.0, ge=0, description="Latest observed peak of requests per second")
    source: str = Field(description="lstm, reactive or oracle")
    reason: str = Field(default="", description="Why this source")
    hold_reason: str = Field(default="", exclude_if=is_empty, description="Why more is planned for than was forecast")
    recent_error: float | None = Field(default=None, description="SMAPE of the source's recent forecasts, 0…2")


class Expectation(Model):
    """What the whole plan is expected to give."""

    accuracy: Fraction = Field(
        description="Of answers under the planned load: product over the stages, whatever the objective's metric; "
        "where the router mixes operating points, of the best mix that its replicas have seconds for"
    )
    latency_seconds: float = Field(ge=0, description="Worst path through the stages")
    cores: float = Field(ge=0)
    gpus: int = Field(default=0, ge=0)
    objective: float = Field(description="Value of the objective that was optimised")


class RunnerUp(Model):
    """The best plan that differs, and what choosing it would cost."""

    stages: dict[str, str] = Field(description="Stage to a short line such as `read-l ×2 batch 8`")
    objective_loss: float


class Explanation(Model):
    """Why this plan."""

    change: str = Field(default="", description="What changed against the plan before, and why")
    accuracy_basis: str = Field(
        default="", description="What its accuracies are: expected values, or the lower ends of their intervals"
    )
    excluded_points: tuple[str, ...] = Field(
        default=(),
        max_length=1024,
        exclude_if=is_empty,
        description="Operating points that the router may not run, and why",
    )
    drifted_accuracies: tuple[str, ...] = Field(
        default=(),
        max_length=1024,
        exclude_if=is_empty,
        description="Operating points that are not as accurate as they were measured to be, and what counts instead",
    )
    batch_sizes_capped: tuple[str, ...] = Field(
        default=(),
        max_length=1024,
        exclude_if=is_empty,
        description="Stages whose batch sizes are larger than their departure policy sends, and what counts instead",
    )
    placement: str = Field(
        default="",
        exclude_if=is_empty,
        description="Whether images are encoded apart, where the plan chooses, and what the other way would cost",
    )
    binding_constraint: str = Field(default="", description="What keeps the objective from being better")
    runner_up: RunnerUp | None = None
    solver: str = Field(default="", description="Exact, HiGHS or Gurobi; with the reason where another was asked for")
    gap: float = Field(default=0.0, ge=0, description="Proven: no plan's objective is greater by more than this")
    solve_seconds: float = Field(default=0.0, ge=0)


class PipelinePlanSpec(Model):
    """One decision of the adapter."""

    pipeline: Name
    generation: int = Field(ge=1, description="Grows with every decision that changed anything")
    created_at: float = Field(description="Unix time in seconds")
    feasible: bool = Field(default=True, description="False: the least-bad plan; `reason` says what gives")
    reason: str = Field(default="Optimal", description="Optimal, or why no plan meets every constraint")
    planned_fraction: Fraction = Field(default=1.0, description="Share of the forecast load this plan can carry")
    stages: tuple[StagePlan, ...] = Field(min_length=1, max_length=32)
    forecast: ForecastRecord | None = None
    expected: Expectation | None = None
    explanation: Explanation = Explanation()

    def stage(self, name: str) -> StagePlan:
        """The plan of that stage; KeyError names the ones there are."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"the plan has no stage {name!r}; it has: {', '.join(stage.name for stage in self.stages)}")

    @model_validator(mode="after")
    def _unique_stages(self) -> Self:
        require_unique((stage.name for stage in self.stages), "stages")
        return self


class PipelinePlan(Resource):
    """A plan as the adapter publishes it."""

    kind: Literal["PipelinePlan"] = "PipelinePlan"
    spec: PipelinePlanSpec
