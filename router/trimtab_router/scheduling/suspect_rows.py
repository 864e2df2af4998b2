"""`SuspectRows`: rows of one stage that a replica computed when its connection broke.

One of these rows may have ended the process. They are retried alone, and only while another ready replica is left, so
that a row which ends processes never takes the last replica of several. Once the exit code of the replica is known,
rows that a signal from outside interrupted are retried at once, and rows that ended a process alone are not retried.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from signal import SIGINT, SIGKILL, SIGTERM

from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

OUTSIDE_CODES = frozenset({-SIGINT, -SIGKILL, -SIGTERM})
"""Exit codes of processes that another process ended."""


class Verdict(Enum):
    """What to do with a suspect."""

    RETRY = auto()
    RETRY_ALONE = auto()
    FAIL = auto()
    GIVE_UP = auto()


@dataclass(frozen=True, slots=True)
class Suspect:
    """Rows that wait for a verdict."""

    row_slice: RowSlice
    replica: str
    """Name of the replica that was lost."""
    sole: bool
    """Whether the replica computed no other rows."""
    until: float
    """When they are given up."""


@dataclass(slots=True)
class SuspectRows:
    """Suspects of one stage. Times are seconds on the scheduler's clock."""

    grace_seconds: float = 0.0
    """Least time that a suspect waits, whatever its deadline."""
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    """Of replicas that ended, by name."""
    waiting: list[Suspect] = field(default_factory=list)
    retried: list[StageRequest] = field(default_factory=list)
    """Requests of suspects whose retry has not ended."""

    def hold(self, row_slice: RowSlice, batch: Batch, now: float) -> None:
        sole = len(batch.row_slices) == 1 and not batch.replica.capacity
        until = max(row_slice.request.due_at, now + self.grace_seconds)
        self.waiting.append(Suspect(row_slice, batch.replica.name, sole, until))

    def on_batch_end(self, batch: Batch) -> None:
        ended = [row_slice.request for row_slice in batch.row_slices]
        self.retried = [request for request in self.retried if request not in ended]

    def judge(self, spare_replicas: int, now: float) -> Iterator[tuple[Suspect, Verdict]]:
        """Yield the suspects that need not wait longer; at most `spare_replicas` retries run at a time."""
        waiting, self.waiting = self.waiting, []
        self.retried = [request for request in self.retried if not request.closed]
        for suspect in waiting:
            if suspect.row_slice.request.closed:
                continue
            code = self.exit_codes.get(suspect.replica)
            if code in OUTSIDE_CODES:
                yield suspect, Verdict.RETRY
            elif code is not None and suspect.sole:
                yield suspect, Verdict.FAIL
            elif len(self.retried) < spare_replicas:
                self.retried.append(suspect.row_slice.request)
                yield suspect, Verdict.RETRY_ALONE
            elif suspect.until <= now:
                yield suspect, Verdict.GIVE_UP
            else:
                self.waiting.append(suspect)
