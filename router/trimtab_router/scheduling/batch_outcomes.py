"""Batch outcomes: a transport returns one of these values and never raises; the scheduler decides what follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab_protocol.tensors import Array


@dataclass(slots=True)  # frozen would double the cost of construction
class Completed:
    """Every row slice has its outputs. Treat it as immutable."""

    outputs: Sequence[Mapping[str, Array]]
    """Of each row slice, in the order of the batch."""
    point: str
    """The operating point that ran."""
    compute_seconds: float | None = None
    """Reported by the replica; None if it reports none."""
    replica_queue_seconds: float | None = None
    """Time in the replica's queue, as reported; None if it reports none."""
    shared_outputs: Sequence[Mapping[str, Array] | None] = ()
    """Of each row that joined the batch; None if the embedding was not stored for it."""


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The replica disappeared, timed out, or returned another batch; `delivered`: it may have received the rows."""

    message: str
    delivered: bool = True


@dataclass(frozen=True, slots=True)
class NotReady:
    """The replica reports that it cannot serve now."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The replica rejects the rows of the batch; `code` is its HTTP status."""

    message: str
    code: int = 400


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The replica failed or returned malformed outputs; `retryable`: a retry may succeed."""

    message: str
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class StreamCut:
    """A stream ended early; `lost`: because the replica disappeared."""

    message: str
    lost: bool = True


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client disconnected, and the generation at the replica was cancelled."""


BatchOutcome = Completed | ReplicaLost | NotReady | Rejected | BatchFailed | StreamCut | Cancelled
