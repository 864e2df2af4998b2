"""What a cluster reports about a pipeline and a plan. Amounts are strings as people read them, as in Kubernetes."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from trimtab_pipelines.resource import Model, Name

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
"""Written by the adapter; the others by the operator. Ready is the sum of all others."""


class Condition(Model):
    """One aspect, true when it is well."""

    type: str = Field(max_length=63)
    status: Literal["True", "False", "Unknown"]
    reason: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", max_length=63, description="CamelCase, stable")
    message: str = Field(default="", max_length=2048, description="What is the matter and what to do")
    last_transition_time: str = Field(description="When status last changed, RFC 3339")
    observed_generation: int | None = Field(default=None, ge=0)


class StageStatus(Model):
    """What runs in one stage."""

    name: Name
    variant: Name
    operating_point: Name = "default"
    batch_size: int = Field(ge=1)
    replicas: int = Field(ge=0, description="Asked for by the plan")
    ready_replicas: int = Field(default=0, ge=0, description="Ready with the planned variant")


class Decision(Model):
    """One plan of the past."""

    generation: int = Field(ge=1)
    time: str = Field(description="RFC 3339")
    change: str = Field(default="", max_length=1024)
    stages: dict[str, str] = Field(default_factory=dict, description="Stage to a line such as `read-l ×2 batch 8`")


class Schedulable(Model):
    """How much of the budget found room on the nodes when it last did not all fit."""

    cores: str
    gpus: int = Field(default=0, ge=0)
    since: str = Field(description="RFC 3339")
    message: str = Field(default="", max_length=1024)


class InferencePipelineStatus(Model):
    """Status of an InferencePipeline. The adapter writes measured amounts and history, the operator the rest."""

    observed_generation: int | None = Field(default=None, ge=0)
    conditions: tuple[Condition, ...] = ()
    url: str | None = Field(default=None, description="Where clients send requests, inside the cluster")
    reason: str | None = Field(default=None, description="Reason of the condition Ready")
    plan_generation: int | None = Field(default=None, ge=0, description="Generation of the plan that is in force")
    stages: tuple[StageStatus, ...] = ()
    cores: str | None = Field(default=None, description="Asked for by all replicas that exist")
    schedulable: Schedulable | None = Field(default=None, description="Set while the nodes hold less than the budget")
    rps: str | None = Field(default=None, description="Requests per second that arrived, last observed")
    forecast_rps: str | None = Field(default=None, description="Peak the plan in force stands on")
    accuracy: str | None = Field(default=None, description="Accuracy expected of what was served in the last minute")
    p99: str | None = Field(default=None, description="99th percentile of latency in the last minute")
    history: tuple[Decision, ...] = Field(default=(), max_length=20, description="Latest first")


class PipelinePlanStatus(Model):
    """Status of a PipelinePlan, written by the operator."""

    observed_generation: int | None = Field(default=None, ge=0)
    conditions: tuple[Condition, ...] = ()
    applied_generation: int | None = Field(default=None, ge=0, description="spec.generation last made true")


def condition_of(found: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object, empty where it has none of that name."""
    written = (found.get("status") or {}).get("conditions") or ()
    return next((one for one in written if one["type"] == kind), {})
