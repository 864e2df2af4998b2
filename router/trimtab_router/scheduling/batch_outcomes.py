"""How a batch ended. Seven values: what follows from each is the desk's to decide, not the carrier's to throw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab_protocol.tensors import Array


@dataclass(slots=True)  # not frozen, which costs as much as all else about making one
class Completed:
    """Every member has its rows. Nobody changes it."""

    outputs: Sequence[Mapping[str, Array]]
    """Of each member, in the order of the batch."""
    point: str
    """The operating point that ran."""
    compute_seconds: float | None = None
    """What the replica says it computed; None where it says nothing."""
    replica_queue_seconds: float | None = None
    """How long the batch waited at its replica for others; None where it says nothing."""
    shared_outputs: Sequence[Mapping[str, Array] | None] = ()
    """What each of those who ride along has of it; None where that was not to be had."""


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The replica went away, did not answer in time, or answered another batch; `delivered`: it may have the rows."""

    message: str
    delivered: bool = True


@dataclass(frozen=True, slots=True)
class NotReady:
    """The replica says that it cannot serve now."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The replica says that rows of the batch are at fault; `code`: by which HTTP status."""

    message: str
    code: int = 400


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The replica failed, or its answer is not what the stage promises; `again`: another try may help."""

    message: str
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class StreamCut:
    """A part of an answer was written, and no more will come; `lost`: because the replica went away."""

    message: str
    lost: bool = True


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for it any more, and the replica was told so."""


BatchOutcome = Completed | ReplicaLost | NotReady | Rejected | BatchFailed | StreamCut | Cancelled
