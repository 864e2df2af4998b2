"""What a router tells of itself: `/trimtab/v1/state` and `/trimtab/v1/arrivals`, for whoever asks it.

While parts are upgraded one after the other, a router may tell more than its reader knows, or less: what a reader does
not know is left out, and what is not told has its default.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trimtab_pipelines.accuracy_evidence import Accuracy

STATE_PATH = "/trimtab/v1/state"
ARRIVALS_PATH = "/trimtab/v1/arrivals"
READY_PATH = "/readyz"
TASKS_PATH = "/trimtab/v1/tasks"
"""Answers well once callers may come, until the router leaves."""
HISTORY_SECONDS = 600
"""How much of the load a router tells where nobody says how much."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class StateModel(BaseModel):
    """A frozen value that a router told."""

    model_config = ConfigDict(frozen=True, strict=True)


class EndpointState(StateModel):
    """A replica as its router sees it."""

    ready: bool = False
    inflight_batches: Count = 0
    rejection: str = ""
    """Why it gets no work, where it is not who it must be."""


class RegisteredAccuracy(StateModel):
    """How accurate an operating point is on a task that joined, as the task's card tells it."""

    value: Finite
    low: Finite | None = None
    high: Finite | None = None
    samples: int | None = None
    mean_confidence: Finite | None = None
    source: str = ""

    @classmethod
    def of(cls, judged: Accuracy) -> "RegisteredAccuracy":
        """Tell an accuracy."""
        return cls(**judged.model_dump(by_alias=False, include=set(cls.model_fields)))


class StageState(StateModel):
    """What a stage runs now."""

    variant: str = ""
    batch_size: int = 1
    operating_point: str = ""
    ready_replicas: Count = 0
    queue_rows: Count = 0
    service_ratio: Finite | None = None
    """Observed over predicted service time."""
    rows_per_request: Finite | None = None
    """The fan-out of the last minute; None before the first request."""
    prompt_tokens: Finite | None = None
    """Of the prompts that came in the last minute, on average, as they were predicted; None where nobody knows."""
    drifted_accuracies: dict[str, Finite] = {}
    """By operating point of what it runs: how accurate those are by now that are not what they were measured to be."""
    drifted_by_task: dict[str, dict[str, Finite]] = {}
    """The same on single tasks, by operating point and task; tasks that are not told drift along with their point."""
    registered_accuracies: dict[str, dict[str, dict[str, RegisteredAccuracy]]] = {}
    """Of tasks that joined, by variant and operating point: how accurate these are on each."""
    endpoints: dict[str, EndpointState] = {}


class RecentRequests(StateModel):
    """What became of the last minute's requests; p99 and accuracy are None where nothing was answered."""

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
        """Requests that got a result."""
        return self.ok + self.late


class RouterState(StateModel):
    """What a router runs now, and what it measured."""

    plan_generation: Count = 0
    plan_applied_at: float | None = None
    ready: bool = False
    served: RecentRequests | None = None
    accuracy_sources: str = ""
    """Where the accuracies that answers are expected to have come from, such as `measured`."""
    stages: dict[str, StageState]


class RouterLoad(StateModel):
    """Arrivals of each of the last whole seconds before `now` (Unix time), oldest first."""

    now: Finite
    rps: Sequence[Finite]
