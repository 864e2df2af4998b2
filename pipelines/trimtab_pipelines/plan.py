"""`PipelinePlan`: the variant, batch size, replicas and operating points of each stage, with an explanation."""

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.accuracy_evidence import AccuracyBasis
from trimtab_pipelines.escalation import MAX_ESCALATIONS, EscalationPlan
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.quantity import Cores, Fraction, SecondsBySize
from trimtab_pipelines.replica_groups import group_of, replica_groups
from trimtab_pipelines.resource import Model, Name, Resource, find_named, is_empty, require_unique
from trimtab_pipelines.rollout import Capacity, total
from trimtab_pipelines.row_shares import AnsweredBy
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tensors import TensorName

MAX_POINTS = 128
"""Points above, and points below, the planned one."""


class PointPlan(Model):
    """An operating point that a stage may run."""

    name: Name
    variant: Name | None = Field(default=None, exclude_if=lambda variant: variant is None)
    """Variant of the point; the stage's planned variant if absent."""
    accuracy: Fraction
    """Accuracy of the variant at this point."""
    accuracy_by_task: dict[Name, Fraction] = Field(default_factory=dict, exclude_if=is_empty)
    """Accuracy on individual tasks, if known."""
    inputs: tuple[TensorName, ...] = Field(default=(), max_length=16, exclude_if=is_empty)
    """Inputs that batches include in addition to the stage's required inputs; all if empty."""
    service_seconds: SecondsBySize = Field(default_factory=dict)
    """Expected service time of a batch in seconds, by its number of rows."""
    escalations: tuple[EscalationPlan, ...] = Field(default=(), max_length=MAX_ESCALATIONS, exclude_if=is_empty)
    """Escalations that the router may use for low-confidence rows of this point."""

    def key(self, planned: str) -> tuple[str, str]:
        """Variant and name; `planned` is the stage's planned variant."""
        return self.variant or planned, self.name


class RowShare(Model):
    """Expected share of a stage's rows that an operating point answers."""

    variant: Name
    operating_point: Name = "default"
    share: Fraction
    escalated: bool = Field(default=False, exclude_if=is_empty)
    """Whether another point serves the rows first, and their confidence is low."""


class ReplicaGroupPlan(Model):
    """Planned replicas of one replica group of a stage."""

    variant: Name
    """A variant that the group hosts."""
    replicas: int = Field(ge=0)
    cores: Cores = 1.0
    """Cores of one replica."""

    @property
    def all_cores(self) -> float:
        return self.replicas * self.cores


class StagePlan(Model):
    """Planned configuration of one stage, and its expected performance."""

    name: Name
    variant: Name
    batch_size: int = Field(ge=1, le=4096)
    """Maximum number of rows in a batch, with which latency and throughput were planned."""
    max_batch_size: int | None = Field(default=None, ge=1, le=4096, exclude_if=lambda size: size is None)
    """Maximum number of rows in a batch while more than `batchSize` rows wait; `batchSize` if absent."""
    replicas: int = Field(ge=0)
    """Number of replicas. 0 if the stage receives no traffic because its generation stage runs a variant with a
    colocated encoder.
    """
    operating_point: Name = "default"
    upgrades: tuple[PointPlan, ...] = Field(default=(), max_length=MAX_POINTS, exclude_if=is_empty)
    """More accurate points, best first. The router may use them if time allows or a request requires them."""
    fallbacks: tuple[PointPlan, ...] = Field(default=(), max_length=MAX_POINTS)
    """Faster points, best first. The router may use them when slack runs out."""
    cores: Cores = 1.0
    """Cores of one replica."""
    other_groups: tuple[ReplicaGroupPlan, ...] = Field(default=(), max_length=8, exclude_if=is_empty)
    """Replicas of other replica groups than the variant's, which serve rows of the same queue."""
    accuracy: Fraction
    """Accuracy of the variant at its operating point."""
    accuracy_by_task: dict[Name, Fraction] = Field(default_factory=dict, exclude_if=is_empty)
    """Accuracy on individual tasks, if known."""
    inputs: tuple[TensorName, ...] = Field(default=(), max_length=16, exclude_if=is_empty)
    """Inputs that batches include in addition to the stage's required inputs; all if empty."""
    service_seconds: SecondsBySize = Field(default_factory=dict)
    """Expected service time of a batch in seconds, by its number of rows."""
    escalations: tuple[EscalationPlan, ...] = Field(default=(), max_length=MAX_ESCALATIONS, exclude_if=is_empty)
    """Escalations that the router may use for low-confidence rows of this point."""
    prompt_tokens: float = Field(default=0.0, ge=0, exclude_if=is_empty)
    """Mean number of prompt tokens that serviceSeconds refer to; for generation stages."""
    prefill_seconds: SecondsBySize = Field(default_factory=dict, max_length=32, exclude_if=is_empty)
    """Expected time to first token of a prompt in seconds, by its number of tokens; for generation stages."""
    throughput_rps: float = Field(default=0.0, ge=0)
    """Rows per second that all replicas can serve at the fastest allowed point."""
    latency_seconds: float = Field(default=0.0, ge=0)
    """Planned queueing and service time of the stage."""
    planned_escalation: EscalationPlan | None = Field(default=None, exclude_if=lambda escalation: escalation is None)
    """The escalation with which capacity and accuracy were planned, if any."""
    mixed_accuracy: Fraction | None = Field(default=None, exclude_if=lambda accuracy: accuracy is None)
    """Expected accuracy of all rows, if the replicas have time to serve only a part of them at the planned point, with
    its escalation, and a lighter point serves the others.
    """
    shares: tuple[RowShare, ...] = Field(default=(), max_length=8, exclude_if=is_empty)
    """Expected shares of the rows by the point that answers them; absent if the planned point answers all."""
    shadow_price: float = Field(default=0.0, ge=0, exclude_if=is_empty)
    """Shadow price of replica time: expected correct responses per replica second, from the profile."""
    shadow_price_at_rps: float = Field(default=0.0, ge=0, exclude_if=is_empty)
    """Rows per second for which the shadow price was computed. The router recomputes it from observed service times."""

    @model_validator(mode="before")
    @classmethod
    def _drop_fallback_names(cls, fields: object) -> object:
        """Accept older plans, which have an empty list of fallback names."""
        if isinstance(fields, dict) and not fields.get("fallbackOperatingPoints", True):
            return {key: value for key, value in fields.items() if key != "fallbackOperatingPoints"}
        return fields

    @property
    def largest_batch(self) -> int:
        """Maximum number of rows in a batch while many rows wait."""
        return self.max_batch_size or self.batch_size

    @property
    def planned(self) -> PointPlan:
        """The operating point with which capacity and accuracy were planned."""
        return PointPlan(
            name=self.operating_point,
            accuracy=self.accuracy,
            accuracy_by_task=self.accuracy_by_task,
            inputs=self.inputs,
            service_seconds=self.service_seconds,
            escalations=self.escalations,
        )

    @property
    def groups(self) -> tuple[ReplicaGroupPlan, ...]:
        """Planned replicas by replica group, the planned variant's first."""
        return ReplicaGroupPlan(variant=self.variant, replicas=self.replicas, cores=self.cores), *self.other_groups

    @property
    def second_pass_group(self) -> str:
        """Variant of another replica group that serves the rows of the planned escalation; empty if there is none."""
        target = "" if self.planned_escalation is None else self.planned_escalation.target(self.variant)[0]
        return target if any(group.variant == target for group in self.other_groups) else ""

    @property
    def all_replicas(self) -> int:
        """Planned replicas of all replica groups."""
        return sum(group.replicas for group in self.groups)

    @property
    def all_cores(self) -> float:
        """Cores of all replicas."""
        return sum(group.all_cores for group in self.groups)

    @property
    def expected_accuracy(self) -> float:
        """Expected accuracy of all rows at the planned load."""
        if self.mixed_accuracy is not None:
            return self.mixed_accuracy
        return self.accuracy if self.planned_escalation is None else self.planned_escalation.accuracy

    @property
    def expected_rows(self) -> dict[AnsweredBy, float]:
        """Expected shares of the rows by the point that answers them."""
        shares = {AnsweredBy(each.variant, each.operating_point, each.escalated): each.share for each in self.shares}
        return shares or {AnsweredBy(self.variant, self.operating_point): 1.0}

    @property
    def points(self) -> tuple[PointPlan, ...]:
        """Every operating point the router may run, preferred first."""
        return (*self.upgrades, self.planned, *self.fallbacks)

    @model_validator(mode="after")
    def _unique_points(self) -> Self:
        names = (point.name if not point.variant else "/".join(point.key(self.variant)) for point in self.points)
        require_unique(names, f"stage {self.name}: operating points")
        return self


def unmeasured_point_plan(point: OperatingPoint, basis: AccuracyBasis = "Expected") -> PointPlan:
    return PointPlan(
        name=point.name,
        accuracy=point.accuracy_on(basis),
        accuracy_by_task=point.accuracies_by_task(basis),
        inputs=point.modalities,
        escalations=point.planned_escalations(basis),
    )


def initial_stage_plan(stage: Stage) -> StagePlan:
    """Plan of a stage without a plan: its first variant with batch size 1."""
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
    """The load that a plan was made for."""

    peak_rps: float = Field(ge=0)
    """Requests per second planned for."""
    quantile: float | None = Field(default=None, ge=0, le=1)
    """Quantile of the forecast peak that was planned for; the median if absent."""
    observed_rps: float = Field(default=0.0, ge=0)
    """Latest observed peak of requests per second."""
    source: str
    """Forecaster: lstm, reactive or oracle."""
    reason: str = ""
    """Why this forecaster was used."""
    hold_reason: str = Field(default="", exclude_if=is_empty)
    """Why the plan is for more load than forecast."""
    recent_error: float | None = None
    """SMAPE of the forecaster's recent forecasts, 0…2."""


class Expectation(Model):
    """Expected performance of the plan."""

    accuracy: Fraction
    """Expected accuracy at the planned load: the product over the stages, whatever the objective's metric. If the
    router mixes operating points, of the best mix that the replicas have time for.
    """
    latency_seconds: float = Field(ge=0)
    """Latency of the slowest path through the stages."""
    cores: float = Field(ge=0)
    gpus: int = Field(default=0, ge=0)
    cost_per_hour: float = Field(default=0.0, ge=0, exclude_if=is_empty)
    """At the prices of the resource flavors, if there are any."""
    cost_by_flavor: dict[Name, float] = Field(default_factory=dict, exclude_if=is_empty)
    """Cost an hour by resource flavor, if there are any."""
    objective: float
    """Value of the optimized objective."""


class RunnerUp(Model):
    """The best different plan, and the loss of choosing it."""

    stages: dict[str, str]
    """Summary of each stage, such as `read-l ×2 batch 8`."""
    objective_loss: float


class Explanation(Model):
    """Explanation of the plan."""

    change: str = ""
    """What changed from the previous plan, and why."""
    accuracy_basis: str = ""
    """Whether the plan's accuracies are expected values or the lower ends of confidence intervals."""
    excluded_points: tuple[str, ...] = Field(default=(), max_length=1024, exclude_if=is_empty)
    """Operating points that the router may not run, and why."""
    drifted_accuracies: tuple[str, ...] = Field(default=(), max_length=1024, exclude_if=is_empty)
    """Operating points whose observed accuracy differs from the profiled one, and the accuracy used instead."""
    batch_sizes_capped: tuple[str, ...] = Field(default=(), max_length=1024, exclude_if=is_empty)
    """Stages whose planned batch size is limited by the scheduling policy."""
    placement: str = Field(default="", exclude_if=is_empty)
    """Chosen encoder placement, and the cost of the alternative, if the plan chooses."""
    binding_constraint: str = ""
    """The constraint that limits the objective."""
    runner_up: RunnerUp | None = None
    solver: str = ""
    """Exact, HiGHS or Gurobi, with the reason if it is not the configured one."""
    gap: float = Field(default=0.0, ge=0)
    """Proven bound on the objective lost against the optimal plan."""
    solve_seconds: float = Field(default=0.0, ge=0)


class PipelinePlanSpec(Model):
    """A decision of the adapter."""

    pipeline: Name
    generation: int = Field(ge=1)
    """Number of the decision; increases with every change."""
    created_at: float
    """Unix time in seconds."""
    feasible: bool = True
    """Whether the plan meets every constraint. If false, reason names the relaxed one."""
    reason: str = "Optimal"
    """Optimal, or why no plan meets every constraint."""
    planned_fraction: Fraction = 1.0
    """Share of the forecast load that this plan can carry."""
    stages: tuple[StagePlan, ...] = Field(min_length=1, max_length=32)
    routers: int = Field(default=1, ge=1, exclude_if=lambda routers: routers == 1)
    """Number of routers that carry the planned load."""
    forecast: ForecastRecord | None = None
    expected: Expectation | None = None
    explanation: Explanation = Explanation()

    def stage(self, name: str) -> StagePlan:
        """Return the plan of a stage; KeyError lists the planned stages."""
        return find_named(self.stages, name, "the plan has no stage")

    @model_validator(mode="after")
    def _unique_stages(self) -> Self:
        require_unique((stage.name for stage in self.stages), "stages")
        return self


class PipelinePlan(Resource):
    """PipelinePlan is the adapter's decision on what a pipeline runs."""

    kind: Literal["PipelinePlan"] = "PipelinePlan"
    spec: PipelinePlanSpec


def plan_capacity(plan: PipelinePlan, spec: InferencePipelineSpec) -> Capacity:
    """Resources of a plan's replicas by the requests of the pipeline's variants, whatever `cores` the plan names."""
    requests = {
        (stage.name, variant.name): group.capacity
        for stage in spec.stages
        for group in replica_groups(stage)
        for variant in group.variants
    }
    groups = ((stage.name, group) for stage in plan.spec.stages for group in stage.groups)
    return total(requests.get((name, group.variant), Capacity()).times(group.replicas) for name, group in groups)


def budget_capacity(spec: InferencePipelineSpec, more_cores: float = 0.0) -> Capacity:
    """Limit of what all replicas together may request."""
    return Capacity(spec.budget.cores + more_cores, spec.budget.gpus, spec.flavor_limits)


def costs_by_flavor(stages: Iterable[StagePlan], spec: InferencePipelineSpec) -> dict[str, float]:
    """Cost an hour of the planned replicas by resource flavor."""
    costs: dict[str, float] = {}
    for stage in stages:
        for planned in stage.groups:
            group = group_of(spec.stage(stage.name), planned.variant)
            flavor = spec.flavor(group.variants[0]).name
            costs[flavor] = costs.get(flavor, 0.0) + planned.replicas * group.cost_per_hour(spec)
    return costs


def idle_stages(plan: PipelinePlan, spec: InferencePipelineSpec) -> frozenset[str]:
    """Stages without traffic under a plan: encoder stages whose generation stage runs a colocated encoder."""
    return frozenset(
        encoder
        for writer, encoder in spec.encoders.items()
        if spec.stage(writer).variant(plan.spec.stage(writer).variant).colocated
    )
