"""State and arrivals that a router reports at `/trimtab/v1/state` and `/trimtab/v1/arrivals`, and its metrics' names.

While components are upgraded, a router may report more or fewer fields than its reader knows: unknown fields are
ignored, and absent ones have their default.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.row_shares import AnsweredBy, Rows

STATE_PATH = "/trimtab/v1/state"
ARRIVALS_PATH = "/trimtab/v1/arrivals"
READY_PATH = "/readyz"
LIVE_PATH = "/livez"
"""Returns 200 while the router accepts requests."""
TASKS_PATH = "/trimtab/v1/tasks"
HISTORY_SECONDS = 600
"""Default length of the reported arrivals."""

RECEIVED = "trimtab_requests_received_total"
REQUESTS = "trimtab_requests_total"
"""By outcome; the outcomes add up to the received requests."""
CLIENT_ERRORS = "trimtab_client_errors_total"
"""Requests that were refused or dropped because of the client."""
DROPS = "trimtab_drops_total"
LATENCY_SECONDS = "trimtab_request_latency_seconds"
"""Histogram."""
TTFT_SECONDS = "trimtab_ttft_seconds"
"""Histogram by modality: from arrival to the first token of a generated response."""
TBT_SECONDS = "trimtab_tbt_seconds"
"""Histogram by modality: time between two tokens of a generated response."""
TOKENS = "trimtab_tokens_total"
"""By modality and direction."""
IMAGES = "trimtab_images_per_request"
"""Histogram by modality."""
CANCELLED_ROWS = "trimtab_cancelled_rows_total"
"""By stage: rows cancelled by their client while they were generated."""
ENCODER_DEDUP = "trimtab_encoder_dedup_total"
"""By stage and source: images that reused an encoding made for another request."""
EARLY_PREFILLS = "trimtab_early_prefills_total"
"""By stage: chats whose prefill started before all of their images were encoded."""
POLICY_ERRORS = "trimtab_policy_errors_total"
"""By stage: decisions in which the scheduling policy failed."""
EXPECTED_ACCURACY = "trimtab_expected_accuracy"
"""Summary."""
ARRIVALS_PEAK_RPS = "trimtab_arrivals_peak_rps"
BYTES_IN_FLIGHT = "trimtab_bytes_in_flight"
POINT_ROWS = "trimtab_operating_point_rows_total"
"""By stage, variant and operating point; an escalated row counts at both points."""
ESCALATED_ROWS = "trimtab_escalated_rows_total"
"""By stage: rows that a second point served again, by the variant and operating point of both."""
ESCALATED_LABELS = ("variant", "operating_point", "to_variant", "to_operating_point")
UNESCALATED_RESPONSES = "trimtab_unescalated_responses_total"
DRIFTED_POINTS = "trimtab_drifted_points"
OUTPUT_DRIFT = "trimtab_output_drift"

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


class VariantState(StateModel):
    """Learned figures of a variant."""

    service_ratio: Finite | None = None
    """Observed over profiled service time of the variant's last seconds; None before its first batch."""
    drifted_outputs: dict[str, Finite] = {}
    """By operating point: how far the mix of its classes is from that of its evidence, 0…1, if it has changed."""
    drifted_accuracies: dict[str, Finite] = {}
    """Observed accuracy of each operating point whose accuracy has drifted from the profiled one."""
    drifted_by_task: dict[str, dict[str, Finite]] = {}
    """The same by operating point and task; other tasks drift along with their point."""


class ReportedRows(StateModel):
    """Number of rows that a point answered, or their expected share."""

    variant: str
    operating_point: str
    escalated: bool = False
    """Whether another point had served the rows before."""
    rows: Finite

    @classmethod
    def list_of(cls, rows: Rows) -> "list[ReportedRows]":
        return [cls(**answered_by._asdict(), rows=count) for answered_by, count in rows.items()]


def reported_rows(reported: Iterable[ReportedRows]) -> dict[AnsweredBy, float]:
    return {AnsweredBy(each.variant, each.operating_point, each.escalated): each.rows for each in reported}


class LowConfidenceRows(StateModel):
    """Rows whose confidence at a point was compared to a threshold of an escalation."""

    variant: str
    operating_point: str
    confidence_below: Finite
    """The threshold."""
    rows: Count
    low_rows: Count
    """Rows with less confidence."""


class StageState(VariantState):
    """State of a stage, and the learned figures of the variant that it runs."""

    variant: str = ""
    batch_size: int = 1
    operating_point: str = ""
    ready_replicas: Count = 0
    queue_rows: Count = 0
    other_variants: dict[str, VariantState] = {}
    """Learned figures of the other variants that served rows."""
    expected_shares: Sequence[ReportedRows] = ()
    """Planned shares of the rows by the point that answers them."""
    recent_rows: Sequence[ReportedRows] = ()
    """Rows of the last minute by the point that answered them."""
    low_confidence: Sequence[LowConfidenceRows] = ()
    """Rows of the last minute that were compared to thresholds of escalations."""
    rows_per_request: Finite | None = None
    """Fan-out of the last minute; None before the first request."""
    prompt_tokens: Finite | None = None
    """Mean predicted prompt tokens of the last minute; None if unknown."""
    registered_accuracies: dict[str, dict[str, dict[str, RegisteredAccuracy]]] = {}
    """Accuracy on registered tasks, by variant, operating point and task."""
    endpoints: dict[str, EndpointState] = {}


class RecentRequests(StateModel):
    """Outcomes of the last minute's requests; p99 and accuracy are None without responses."""

    received: Count = 0
    ok: Count = 0
    late: Count = 0
    dropped: Count = 0
    dropped_by_client: Count = 0
    """Dropped ones whose client set a deadline earlier than the SLO, or disconnected before it."""
    refused: Count = 0
    failed: Count = 0
    p99_seconds: Finite | None = None
    accuracy: Finite | None = None

    @property
    def answered(self) -> int:
        return self.ok + self.late


class RouterState(StateModel):
    """State of a router."""

    plan_generation: Count = 0
    plan_applied_at: float | None = None
    ready: bool = False
    cpu_seconds_per_request: Finite | None = None
    """CPU time of the router's process for a request over the last minute; None if too little was done to tell."""
    served: RecentRequests | None = None
    accuracy_sources: str = ""
    """Sources of the expected accuracies, such as `measured`."""
    stages: dict[str, StageState]

    @property
    def rejections(self) -> dict[str, str]:
        """Why the router does not use replicas, by their names."""
        endpoints = [item for stage in self.stages.values() for item in stage.endpoints.items()]
        return {name: endpoint.rejection for name, endpoint in endpoints if endpoint.rejection}


class RouterLoad(StateModel):
    """Arrivals in each of the last whole seconds before `now` (Unix time), oldest first."""

    now: Finite
    rps: Sequence[Finite]
    current: Finite = 0.0
    """Arrivals since the last whole second."""
