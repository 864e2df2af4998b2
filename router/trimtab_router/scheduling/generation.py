"""Rows whose answers are being written, piece by piece: what a desk does beside sending batches and taking them back.

A row's time, as far as promises and predictions go, is that to its first piece. It holds its place in a replica until
its last one, which is what others wait for. Pure.
"""

from collections.abc import Callable, Mapping

from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.batch_outcomes import BatchOutcome, Completed
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

    def __init__(
        self, latency_model: LatencyModel, clock: Clock, transport: StreamingTransport, stats: StatsSink
    ) -> None:
        self.residence_seconds = 0.0
        """How long a row holds its place, as seen lately; 0 before the first."""
        self._latency_model = latency_model
        self._clock = clock
        self._transport = transport
        self._stats = stats
        self.prompt_lengths = PromptLengths()
        self._started: set[Batch] = set()
        self._complete_at: dict[Batch, float] = {}
        self._batches: dict[StageRequest, set[Batch]] = {}

    @property
    def rows(self) -> int:
        """How many are being written."""
        return sum(map(len, self._batches.values()))

    def estimate_prompts(self, request: StageRequest, images: int) -> None:
        """Know of a work how long its prompts are, of a chat that shows so many images."""
        request.prompt_features = [PromptFeatures.of(request.inputs, row, images) for row in range(request.rows)]
        tokens = [self.prompt_lengths.tokens(features) for features in request.prompt_features]
        if any(tokens):
            request.prompt_tokens = tokens
            request.set_prefill_seconds(self._latency_model.prefill_seconds(max(tokens)))

    def send(self, batch: Batch, ended: Callable[[Batch, BatchOutcome], None]) -> None:
        """Have a row written; a parcel of such a stage has one."""
        self._batches.setdefault(batch.row_slices[0].request, set()).add(batch)
        self._transport.stream(batch, self._on_chunk, ended)

    def cancel(self, request: StageRequest) -> None:
        """Have nothing more written of a work that nobody waits for."""
        for batch in list(self._batches.get(request, ())):
            self._transport.cancel(batch)

    def resume(self, batch: Batch) -> None:
        """All that an early row reads is there now: from here on it holds a place."""
        self._complete_at[batch] = self._clock.now

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome) -> None:
        """A row is not being written any more."""
        self._started.discard(batch)
        since = self._complete_at.pop(batch, batch.dispatched_at)
        request = batch.row_slices[0].request
        batches = self._batches[request]
        batches.discard(batch)
        if not batches:
            del self._batches[request]
        if isinstance(outcome, Completed):
            seconds = self._clock.now - since
            weight = WEIGHT if self.residence_seconds else 1.0
            self.residence_seconds += weight * (seconds - self.residence_seconds)

    def _on_chunk(self, batch: Batch, row_slice: Chunk | LastChunk) -> None:
        now, row = self._clock.now, batch.row_slices[0]
        if batch not in self._started:
            self._started.add(batch)
            batch.replica.on_first_token(batch)
            self._stats.observe_batch(batch.key, batch.rows, *self._observe_first_token(batch, now))
        if isinstance(row_slice, LastChunk) and row.request.prompt_features:
            self.prompt_lengths.learn(row.request.prompt_features[row.start], row_slice.usage)
        if not row.request.closed:
            row.request.owner.on_chunk(row.request, row.start, row_slice, now)

    def _observe_first_token(self, batch: Batch, now: float) -> tuple[float, float]:
        """Seconds to a row's first piece, and observed over profiled ones; one that began early teaches nothing."""
        if batch.early_prefill:
            return now - self._complete_at.get(batch, batch.dispatched_at), self._latency_model.service_times.ratio(
                batch.key
            )
        return self._latency_model.observe(batch, Completed((), batch.point.name), now)


def prompt_tokens(
    prompt_sources: Mapping[str, tuple[str, GenerationTracker | None]], inputs: Mapping[str, Array], images: int
) -> dict[str, float]:
    """How many tokens a prompt of a request has on average, by who writes; nothing of whom nobody knows.

    Args:
        writers: the input of the request that has the messages, and who knows of prompts; by stage.
        inputs: of the request.
        images: that each of its chats shows.
    """
    prompt_tokens_by_stage = {}
    for name, (tensor, generation) in prompt_sources.items():
        messages = inputs.get(tensor)
        if generation is not None and messages is not None and len(messages):
            rows = [PromptFeatures.of_messages(messages, row, images) for row in range(len(messages))]
            prompt_tokens_by_stage[name] = sum(map(generation.prompt_lengths.tokens, rows)) / len(rows)
    return {name: tokens for name, tokens in prompt_tokens_by_stage.items() if tokens}
