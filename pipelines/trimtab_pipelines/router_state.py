"""State and arrivals that a router reports at `/trimtab/v1/state` and `/trimtab/v1/arrivals`.

While components are upgraded, a router may report more or fewer fields than its reader knows: unknown fields are
ignored, and absent ones have their default.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trimtab_pipelines.accuracy_evidence import Accuracy

STATE_PATH = "/trimtab/v1/state"
ARRIVALS_PATH = "/trimtab/v1/arrivals"
READY_PATH = "/readyz"
LIVE_PATH = "/livez"
"""Returns 200 while the router accepts requests."""
TASKS_PATH = "/trimtab/v1/tasks"
HISTORY_SECONDS = 600
"""Default length of the reported arrivals."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class StateModel(BaseModel):
    """Base of frozen values in a router's state."""

    model_config = ConfigDict(frozen=True, strict=True)


class EndpointState(StateModel):
    """State of a replica."""

    ready: bool = False
    inflight_batches: Count = 0
    rejection: str = ""
    """Why the router does not use the replica, for example an unexpected certificate."""


class RegisteredAccuracy(StateModel):
    """Accuracy of an operating point on a registered task, from the task's record."""

    value: Finite
    low: Finite | None = None
    high: Finite | None = None
    samples: int | None = None
    mean_confidence: Finite | None = None
    source: str = ""

    @classmethod
    def of(cls, judged: Accuracy) -> "RegisteredAccuracy":
        return cls(**judged.model_dump(by_alias=False, include=set(cls.model_fields)))


class StageState(StateModel):
    """State of a stage."""

    variant: str = ""
    batch_size: int = 1
    operating_point: str = ""
    ready_replicas: Count = 0
    queue_rows: Count = 0
    service_ratio: Finite | None = None
    """Observed over predicted service time."""
    rows_per_request: Finite | None = None
    """Fan-out of the last minute; None before the first request."""
    prompt_tokens: Finite | None = None
    """Mean predicted prompt tokens of the last minute; None if unknown."""
    drifted_accuracies: dict[str, Finite] = {}
    """Observed accuracy of each operating point whose accuracy has drifted from the profiled one."""
    drifted_by_task: dict[str, dict[str, Finite]] = {}
    """The same by operating point and task; other tasks drift along with their point."""
    registered_accuracies: dict[str, dict[str, dict[str, RegisteredAccuracy]]] = {}
    """Accuracy on registered tasks, by variant, operating point and task."""
    endpoints: dict[str, EndpointState] = {}


class RecentRequests(StateModel):
    """Outcomes of the last minute's requests; p99 and accuracy are None without responses."""

    received: Count = 0
    ok: Count = 0
    late: Count = 0
    dropped: Count = 0
    refused: Count = 0
    failed: Count = 0
    p99_seconds: Finite | None = None
    accuracy: Finite | None = None

    @property
    def answered(self) -> int:
        """Requests with a result."""
        return self.ok + self.late


class RouterState(StateModel):
    """State of a router."""

    plan_generation: Count = 0
    plan_applied_at: float | None = None
    ready: bool = False
    served: RecentRequests | None = None
    accuracy_sources: str = ""
    """Sources of the expected accuracies, such as `measured`."""
    stages: dict[str, StageState]


class RouterLoad(StateModel):
    """Arrivals in each of the last whole seconds before `now` (Unix time), oldest first."""

    now: Finite
    rps: Sequence[Finite]
