"""The unit the queues hold: rows of one stage for one request, and the slices of them that travel in batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trimtab_protocol.tensors import Array
from trimtab_router.graph import Runnable
from trimtab_router.refusal import Refusal

Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Served:
    """How a slice was served, for the answer's parameters; `departed_at` is in seconds of the desk's clock."""

    variant: str
    operating_point: str
    batch_rows: int
    queue_seconds: float
    service_seconds: float
    rows: int
    accuracy: float
    departed_at: float


class Owner(Protocol):
    """Whoever waits for the work."""

    trace_parent: str
    request_id: str

    def work_completed(self, work: "Work", outputs: Mapping[str, Array], served: Sequence[Served]) -> None:
        """Take the outputs of all rows, in row order."""

    def work_refused(self, refusal: Refusal) -> None:
        """Take note that these rows will not be served."""


class Work:
    """One stage's share of one request: `rows` rows, answered as a whole or not at all."""

    __slots__ = (
        "_missing",
        "_pieces",
        "closed",
        "deadline",
        "enqueued_at",
        "inputs",
        "owner",
        "queued_rows",
        "rows",
        "signature",
        "stage",
    )

    def __init__(self, owner: Owner, runnable: Runnable, *, deadline: float, now: float) -> None:
        self.owner = owner
        self.stage = runnable.stage
        self.rows = runnable.rows
        self.inputs = runnable.inputs
        self.deadline = deadline
        self.enqueued_at = now
        self.signature: Signature = tuple((name, array.shape[1:]) for name, array in runnable.inputs.items())
        self.closed = False
        self.queued_rows = 0
        self._missing = runnable.rows
        self._pieces: list[tuple[int, Mapping[str, Array], Served]] = []

    def close(self) -> None:
        """No longer wanted: free the inputs at once, wherever slices of it still lie."""
        self.closed = True
        self.inputs = {}
        self._pieces = []

    def add_piece(self, start: int, rows: int, outputs: Mapping[str, Array], served: Served) -> None:
        """Take the outputs of the slice that starts at `start`; hand all over once none is missing."""
        if self.closed:
            return
        self._pieces.append((start, outputs, served))
        self._missing -= rows
        if self._missing:
            return
        pieces = sorted(self._pieces, key=lambda piece: piece[0])
        joined = outputs if len(pieces) == 1 else _join([piece[1] for piece in pieces])
        records = [piece[2] for piece in pieces]
        self.close()
        self.owner.work_completed(self, joined, records)


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Rows `start` to `stop` (exclusive) of a work.

    `attempts` counts the replicas that were lost or broke while holding it; once one was lost it travels `alone`, so
    that rows which break a replica are found out without harm to others.
    """

    work: Work
    start: int
    stop: int
    attempts: int = 0
    alone: bool = False

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.stop - self.start

    def first(self, rows: int) -> "Slice":
        """Only so many of these rows."""
        return Slice(self.work, self.start, self.start + rows, self.attempts, self.alone)

    def array(self, name: str) -> Array:
        """These rows of an input."""
        return self.work.inputs[name][self.start : self.stop]


def _join(pieces: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
