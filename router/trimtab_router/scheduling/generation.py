"""`GenerationTracker`: rows that a generation stage streams.

Latency, for the SLO and for predictions, is time to first token. A row occupies capacity of its replica until its last
token; queued rows wait for that.
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
    """Rows in generation on the replicas of one stage.

    Args:
        latency_model: learns the time to first token.
        clock: the clock.
        transport: streams rows.
        stats: receives counts.
    """

    def __init__(
        self, latency_model: LatencyModel, clock: Clock, transport: StreamingTransport, stats: StatsSink
    ) -> None:
        self.residence_seconds = 0.0
        """Recent mean time that a row occupies capacity; 0 before the first."""
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
        """Rows in generation."""
        return sum(map(len, self._batches.values()))

    def estimate_prompts(self, request: StageRequest, images: int) -> None:
        """Estimate the prompt lengths of a request whose chat has this many images."""
        request.prompt_features = [
            PromptFeatures.from_inputs(request.inputs, row, images) for row in range(request.rows)
        ]
        tokens = [self.prompt_lengths.tokens(features) for features in request.prompt_features]
        if any(tokens):
            request.prompt_tokens = tokens
            request.set_prefill_seconds(self._latency_model.prefill_seconds(max(tokens)))

    def send(self, batch: Batch, on_end: Callable[[Batch, BatchOutcome], None]) -> None:
        """Stream a batch, which has one row in a generation stage."""
        self._batches.setdefault(batch.row_slices[0].request, set()).add(batch)
        self._transport.stream(batch, self._on_chunk, on_end)

    def cancel(self, request: StageRequest) -> None:
        for batch in list(self._batches.get(request, ())):
            self._transport.cancel(batch)

    def resume(self, batch: Batch) -> None:
        """Count a partial chat from now on: all of its images have arrived."""
        self._complete_at[batch] = self._clock.now

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome) -> None:
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
        """Return the time to first token and the ratio to the profile; an early prefill is not learned from."""
        if batch.early_prefill:
            return now - self._complete_at.get(batch, batch.dispatched_at), self._latency_model.service_times.ratio(
                batch.key
            )
        return self._latency_model.observe(batch, Completed((), batch.point.name), now)


def prompt_tokens(
    prompt_sources: Mapping[str, tuple[str, GenerationTracker | None]], inputs: Mapping[str, Array], images: int
) -> dict[str, float]:
    """Return the mean predicted prompt tokens of a request's rows, by generation stage with a prediction.

    Args:
        prompt_sources: the request input with the chat messages, and the tracker, by stage.
        inputs: of the request.
        images: of each of its chats.
    """
    prompt_tokens_by_stage = {}
    for name, (tensor, generation) in prompt_sources.items():
        messages = inputs.get(tensor)
        if generation is not None and messages is not None and len(messages):
            rows = [PromptFeatures.from_messages(messages, row, images) for row in range(len(messages))]
            prompt_tokens_by_stage[name] = sum(map(generation.prompt_lengths.tokens, rows)) / len(rows)
    return {name: tokens for name, tokens in prompt_tokens_by_stage.items() if tokens}
