"""Rows that can begin before all that they read is there: chats of which the first images are encoded.

They begin where a place would idle, behind everybody who has all he needs, and take no place from others as long as
they wait for the rest: their replica lets go on who can. Pure.
"""

from collections.abc import Mapping

from trimtab_router.scheduling.interfaces import StatsSink, StreamingTransport
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest


class EarlyPrefill:
    """The rows of one stage that do not have all they read.

    Args:
        writer: tells replicas of what comes.
        tally: counts those that begin.
    """

    def __init__(self, writer: StreamingTransport, tally: StatsSink) -> None:
        self._writer = writer
        self._tally = tally
        self._waiting: list[StageRequest] = []
        self._begun: dict[StageRequest, Batch] = {}

    def add(self, work: StageRequest) -> None:
        """Know of a row that can begin."""
        self._waiting.append(work)

    @property
    def waiting(self) -> bool:
        """Whether a row has not begun that could."""
        self._waiting = [work for work in self._waiting if not work.closed]
        return bool(self._waiting)

    def queue(self) -> DeadlineQueue | None:
        """The most urgent row that has not begun, as a policy sees what waits; None where there is none.

        Whoever asks takes it out of this queue again.
        """
        if not self.waiting:
            return None
        queue = DeadlineQueue(1)
        queue.push(RowSlice(min(self._waiting, key=lambda work: work.due_at), 0, 1))
        return queue

    def left(self, work: StageRequest) -> None:
        """A row begins, or is to wait for the rest; one that neither does any more is known no longer."""
        self._waiting = [other for other in self._waiting if other is not work]

    def begun(self, parcel: Batch) -> None:
        """A row is in a replica's hands."""
        self._begun[parcel.batch[0].work] = parcel
        self._tally.began_early()

    def ended(self, parcel: Batch) -> None:
        """It is there no more."""
        self._begun.pop(parcel.batch[0].work, None)

    def arrived(self, work: StageRequest, images: Mapping[int, bytes]) -> Batch | None:
        """Tell of images that came, by their numbers; returns the row's parcel, None where it has not begun."""
        parcel = self._begun.get(work)
        if parcel is not None and images:
            self._writer.arrived(parcel, images)
        return parcel
