"""Status of an InferencePipeline and a PipelinePlan. Amounts are formatted strings, as in Kubernetes."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from trimtab_pipelines.resource import Model, Name, is_empty

ConditionType = Literal[
    "Ready",
    "StagesReady",
    "RouteReady",
    "ProfilesReady",
    "MetricsAvailable",
    "ForecastReady",
    "OptimizationReady",
    "PlanApplied",
]
ADAPTER_CONDITIONS: tuple[ConditionType, ...] = ("MetricsAvailable", "ForecastReady", "OptimizationReady")
"""Conditions written by the adapter; the operator writes the others. Ready summarizes all of them."""


class Condition(Model):
    """Condition of one aspect of the current state; status True is healthy."""

    type: str = Field(max_length=63)
    """Type of the condition in CamelCase."""
    status: Literal["True", "False", "Unknown"]
    """One of True, False, Unknown."""
    reason: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", max_length=63)
    """Stable reason for the last transition, in CamelCase."""
    message: str = Field(default="", max_length=2048)
    """Human-readable message with the cause and the remedy."""
    last_transition_time: str
    """Last time the status changed, RFC 3339."""
    observed_generation: int | None = Field(default=None, ge=0)


class StageStatus(Model):
    """Status of one stage."""

    name: Name
    variant: Name
    operating_point: Name = "default"
    batch_size: int = Field(ge=1)
    replicas: int = Field(ge=0)
    """Planned replicas."""
    ready_replicas: int = Field(default=0, ge=0)
    """Ready replicas with the planned variant."""


class Decision(Model):
    """An earlier plan."""

    generation: int = Field(ge=1)
    time: str
    """RFC 3339."""
    change: str = Field(default="", max_length=1024)
    stages: dict[str, str] = Field(default_factory=dict)
    """Summary of each stage, such as `read-l ×2 batch 8`."""


class StageShares(Model):
    """Shares of a stage's rows by the variant that answers them, such as `85 % read-m, 15 % escalated to read-xl`."""

    expected: str = Field(max_length=512)
    """Shares that the plan expects."""
    measured: str = Field(default="", max_length=512)
    """Shares of the last minute; empty without rows."""


class Schedulable(Model):
    """Part of the budget that could be scheduled when the nodes last had too little capacity."""

    cores: str
    gpus: int = Field(default=0, ge=0)
    since: str
    """RFC 3339."""
    message: str = Field(default="", max_length=1024)


class InferencePipelineStatus(Model):
    """Status of an InferencePipeline. The adapter writes measurements and history, the operator the rest."""

    observed_generation: int | None = Field(default=None, ge=0)
    conditions: tuple[Condition, ...] = ()
    url: str | None = None
    """URL of the router inside the cluster."""
    reason: str | None = None
    """Reason of the condition Ready."""
    plan_generation: int | None = Field(default=None, ge=0)
    """Generation of the plan that is applied."""
    stages: tuple[StageStatus, ...] = ()
    cores: str | None = None
    """Cores requested by all existing replicas."""
    devices: str | None = Field(default=None, exclude_if=lambda devices: devices is None)
    """Devices requested by all existing replicas, by resource flavor, such as `2 l4, 1 h100`."""
    schedulable: Schedulable | None = None
    """Set while the nodes have less capacity than the budget."""
    rps: str | None = None
    """Arriving requests per second, last observed."""
    forecast_rps: str | None = None
    """Forecast peak that the plan is made for."""
    cost_per_hour: str | None = Field(default=None, exclude_if=lambda cost: cost is None)
    """Cost of the planned replicas, if resource flavors set prices."""
    accuracy: str | None = None
    """Expected accuracy of the last minute's responses."""
    p99: str | None = None
    """99th percentile of latency in the last minute."""
    shares: dict[Name, StageShares] = Field(default_factory=dict, exclude_if=is_empty)
    """Shares of rows by variant, of stages whose rows several variants answer."""
    history: tuple[Decision, ...] = Field(default=(), max_length=20)
    """Earlier decisions, latest first."""


class PipelinePlanStatus(Model):
    """Status of a PipelinePlan, written by the operator."""

    observed_generation: int | None = Field(default=None, ge=0)
    conditions: tuple[Condition, ...] = ()
    applied_generation: int | None = Field(default=None, ge=0)
    """spec.generation of the last applied plan."""


def condition_of(document: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object; empty if it has none of that type."""
    conditions = (document.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), {})
