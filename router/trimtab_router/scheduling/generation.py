"""Rows whose answers are being written, piece by piece: what a desk does beside sending batches and taking them back.

A row's time, as far as promises and predictions go, is that to its first piece. It holds its place in a replica until
its last one, which is what others wait for. Pure.
"""

from collections.abc import Callable, Mapping

from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.batch_outcomes import Completed, Ending
from trimtab_router.scheduling.interfaces import Clock, StatsSink, StreamingTransport
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.prompt_lengths import PromptFeatures, PromptLengths
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.service_time import WEIGHT
from trimtab_router.scheduling.stage_request import StageRequest


class GenerationTracker:
    """The rows that the replicas of one stage are writing.

    Args:
        outlook: learns how long first pieces take.
        clock: tells the time.
        writer: takes rows to their replicas.
        tally: counts.
    """

    def __init__(self, outlook: LatencyModel, clock: Clock, writer: StreamingTransport, tally: StatsSink) -> None:
        self.held_seconds = 0.0
        """How long a row holds its place, as seen lately; 0 before the first."""
        self._outlook = outlook
        self._clock = clock
        self._writer = writer
        self._tally = tally
        self.prompts = PromptLengths()
        self._begun: set[Batch] = set()
        self._whole_at: dict[Batch, float] = {}
        self._parcels: dict[StageRequest, set[Batch]] = {}

    @property
    def rows(self) -> int:
        """How many are being written."""
        return sum(map(len, self._parcels.values()))

    def weigh(self, work: StageRequest, images: int) -> None:
        """Know of a work how long its prompts are, of a chat that shows so many images."""
        work.prompts = [PromptFeatures.of(work.inputs, row, images) for row in range(work.rows)]
        tokens = [self.prompts.tokens(shown) for shown in work.prompts]
        if any(tokens):
            work.tokens = tokens
            work.read_in(self._outlook.prefill_seconds(max(tokens)))

    def send(self, parcel: Batch, ended: Callable[[Batch, Ending], None]) -> None:
        """Have a row written; a parcel of such a stage has one."""
        self._parcels.setdefault(parcel.batch[0].work, set()).add(parcel)
        self._writer.write(parcel, self._wrote, ended)

    def withdraw(self, work: StageRequest) -> None:
        """Have nothing more written of a work that nobody waits for."""
        for parcel in list(self._parcels.get(work, ())):
            self._writer.abandon(parcel)

    def go_on(self, parcel: Batch) -> None:
        """All that an early row reads is there now: from here on it holds a place."""
        self._whole_at[parcel] = self._clock.now

    def ended(self, parcel: Batch, ending: Ending) -> None:
        """A row is not being written any more."""
        self._begun.discard(parcel)
        since = self._whole_at.pop(parcel, parcel.departed_at)
        work = parcel.batch[0].work
        parcels = self._parcels[work]
        parcels.discard(parcel)
        if not parcels:
            del self._parcels[work]
        if isinstance(ending, Completed):
            seconds = self._clock.now - since
            weight = WEIGHT if self.held_seconds else 1.0
            self.held_seconds += weight * (seconds - self.held_seconds)

    def _wrote(self, parcel: Batch, piece: Chunk | LastChunk) -> None:
        now, row = self._clock.now, parcel.batch[0]
        if parcel not in self._begun:
            self._begun.add(parcel)
            parcel.slot.begun(parcel)
            self._tally.served(parcel.key, parcel.rows, *self._learnt(parcel, now))
        if isinstance(piece, LastChunk) and row.work.prompts:
            self.prompts.learn(row.work.prompts[row.start], piece.usage)
        if not row.work.closed:
            row.work.owner.work_written(row.work, row.start, piece, now)

    def _learnt(self, parcel: Batch, now: float) -> tuple[float, float]:
        """Seconds to a row's first piece, and observed over profiled ones; one that began early teaches nothing."""
        if parcel.early:
            return now - self._whole_at.get(parcel, parcel.departed_at), self._outlook.times.ratio(parcel.key)
        return self._outlook.learn(parcel, Completed((), parcel.point.name), now)


def prompt_tokens(
    writers: Mapping[str, tuple[str, GenerationTracker | None]], inputs: Mapping[str, Array], images: int
) -> dict[str, float]:
    """How many tokens a prompt of a request has on average, by who writes; nothing of whom nobody knows.

    Args:
        writers: the input of the request that has the messages, and who knows of prompts; by stage.
        inputs: of the request.
        images: that each of its chats shows.
    """
    found = {}
    for name, (tensor, writing) in writers.items():
        messages = inputs.get(tensor)
        if writing is not None and messages is not None and len(messages):
            rows = [PromptFeatures.of_messages(messages, row, images) for row in range(len(messages))]
            found[name] = sum(map(writing.prompts.tokens, rows)) / len(rows)
    return {name: tokens for name, tokens in found.items() if tokens}
