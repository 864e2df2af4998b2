"""`EngineCore`: the engine without its thread. Requests in, one step at a time, token events and one last event out.

An error affects only the request that causes it: embeddings that do not fit, logits that are not finite, a token that
cannot be sampled or detokenized, a step that fails. A failed step is computed again chunk by chunk, so that only the
request that makes it fail ends.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trimtab_model_servers.engine.cuda_graphs import GraphCapture
from trimtab_model_servers.engine.model_adapters import ModelAdapter
from trimtab_model_servers.engine.model_runner import DecodeLogits, ModelRunner
from trimtab_model_servers.engine.request import FinishReason, Request, RequestDone, RequestError, TokenChunk, Usage
from trimtab_model_servers.engine.sampling import Sampler, TokenProbabilities, token_probabilities
from trimtab_model_servers.engine.scheduler import Admission, EngineLimits, ScheduledChunk, Scheduler
from trimtab_model_servers.engine.stop_strings import Detokenize, StopFilter

_LOG = logging.getLogger(__name__)

EngineEvent = TokenChunk | RequestDone
EventListener = Callable[[EngineEvent], None]


@dataclass(slots=True)
class _ActiveRequest:
    request: Request
    on_event: EventListener
    sampler: Sampler
    detokenize: Detokenize
    stops: StopFilter


@dataclass(frozen=True, slots=True)
class Gauges:
    """State of the engine. All but ``steps`` return to 0 when no request is in flight."""

    waiting: int = 0
    running: int = 0
    busy_slots: int = 0
    pending_tokens: int = 0
    stored_requests: int = 0
    """Requests whose image embeddings the model runner stores."""
    embedding_bytes: int = 0
    steps: int = 0


class EngineCore:
    """Scheduler, model runner and requests in flight; called by one thread at a time."""

    def __init__(
        self,
        adapter: ModelAdapter,
        limits: EngineLimits,
        *,
        new_detokenizer: Callable[[], Detokenize] | None = None,
        share_prefixes: bool = True,
        graph_capture: GraphCapture | None = None,
    ) -> None:
        """``new_detokenizer`` makes one for each request; None: no text. ``graph_capture`` is as of ModelRunner."""
        self.limits = limits
        self._runner = ModelRunner(adapter, limits, graph_capture)
        self._scheduler = Scheduler(limits, cross_attention=adapter.cross_attention, share_prefixes=share_prefixes)
        self._new_detokenizer = new_detokenizer or (lambda: lambda _: "")
        self._active: dict[str, _ActiveRequest] = {}
        self._steps = 0

    @property
    def gauges(self) -> Gauges:
        scheduler, runner = self._scheduler, self._runner
        return Gauges(
            scheduler.waiting,
            scheduler.running,
            scheduler.busy_slots,
            scheduler.pending_tokens,
            runner.request_count,
            runner.embedding_bytes,
            self._steps,
        )

    def submit(self, request: Request, images: Sequence[Tensor | None], on_event: EventListener) -> None:
        """Enqueue a request and its images' embeddings, None if still encoded; raises RequestError or EngineBusy."""
        if len(images) != len(request.images):
            raise RequestError(f"{len(images)} embeddings for {len(request.images)} images; should be one each")
        self._scheduler.submit(request, tuple(rows is not None for rows in images))
        try:
            self._runner.add_request(request, images)
        except BaseException:
            self._scheduler.finish(request.id)
            raise
        self._active[request.id] = _ActiveRequest(
            request, on_event, Sampler(request.sampling), self._new_detokenizer(), StopFilter(request.stop_strings)
        )

    def add_embeddings(self, request_id: str, embeddings: Mapping[int, Tensor]) -> None:
        """Add embeddings by image number; ones that do not fit end the request. Ignored if it has ended."""
        for image, rows in embeddings.items():
            if request_id not in self._active:
                return
            try:
                self._runner.add_embeddings(request_id, image, rows)
            except (RequestError, IndexError) as error:
                self._end(request_id, FinishReason.ERROR, error=str(error))
            else:
                self._scheduler.mark_image_ready(request_id, image)

    def cancel(self, request_id: str) -> None:
        """End a request as cancelled. Ignored if it has ended."""
        if request_id in self._active:
            self._end(request_id, FinishReason.CANCELLED)

    def fail(self, request_id: str, error: str) -> None:
        """End a request in error. Ignored if it has ended."""
        if request_id in self._active:
            self._end(request_id, FinishReason.ERROR, error=error)

    def fail_all(self, error: str) -> None:
        for request_id, active in list(self._active.items()):
            try:
                self._end(request_id, FinishReason.ERROR, error=error)
            except Exception:  # noqa: BLE001  (the state may be inconsistent: every request must end all the same)
                _LOG.exception("request %s could not be removed", request_id)
                usage = Usage(len(active.request.tokens), 0, sum(image.tokens for image in active.request.images), 0)
                self._notify_end(active, RequestDone(request_id, FinishReason.ERROR, usage, "", error))

    def step(self) -> bool:
        """Compute one step; False if there is nothing to compute."""
        step = self._scheduler.next_step()
        if step is None:
            return False
        self._steps += 1
        for admission in step.admissions:
            self._admit(admission)
        chunks = [chunk for chunk in step.chunks if chunk.request_id in self._active]
        if chunks:
            self._compute(chunks)
        return True

    def _admit(self, admission: Admission) -> None:
        try:
            self._runner.admit(admission)
        except Exception as error:  # noqa: BLE001  (any error ends only this request)
            _LOG.exception("request %s could not be admitted to its slot", admission.request.id)
            self._end(admission.request.id, FinishReason.ERROR, error=_describe(error), invalidate_prefix=True)

    def _compute(self, chunks: Sequence[ScheduledChunk]) -> None:
        try:
            output = self._runner.run(chunks)
        except Exception as error:  # noqa: BLE001  (any error ends only the request that causes it)
            if len(chunks) > 1:
                for chunk in chunks:
                    if chunk.request_id in self._active:
                        self._compute([chunk])
                return
            _LOG.exception("request %s made its step fail", chunks[0].request_id)
            self._end(chunks[0].request_id, FinishReason.ERROR, error=_describe(error), invalidate_prefix=True)
            return
        for chunk in chunks:
            self._scheduler.record_computed(chunk)
        self._sample(output)

    def _sample(self, output: DecodeLogits) -> None:
        if not output.request_ids:
            return
        counts = [self._scheduler.usage(request_id)[0] for request_id in output.request_ids]
        probabilities = token_probabilities(output.logits, self._banned_tokens(output.request_ids, counts))
        # requests that wait for their first token are notified first
        for row in sorted(range(len(counts)), key=lambda row: counts[row] > 0):
            request_id = output.request_ids[row]
            try:
                self._sample_row(request_id, probabilities, row)
            except Exception as error:  # noqa: BLE001  (any error ends only this request)
                _LOG.exception("no token could be sampled for request %s", request_id)
                if request_id in self._active:
                    self._end(request_id, FinishReason.ERROR, error=_describe(error), invalidate_prefix=True)

    def _sample_row(self, request_id: str, probabilities: TokenProbabilities, row: int) -> None:
        token, log_probability = probabilities.greedy_tokens[row], probabilities.greedy_log_probabilities[row]
        if not math.isfinite(log_probability):
            error = "the model's logits are not finite"
            self._end(request_id, FinishReason.ERROR, error=error, invalidate_prefix=True)
            return
        active = self._active[request_id]
        if active.request.sampling.temperature > 0:
            token = active.sampler.sample(probabilities.logits[row])
            log_probability = float(probabilities.log_probabilities[row, token])
        self._emit_token(request_id, token, log_probability)

    def _banned_tokens(self, request_ids: Sequence[str], counts: Sequence[int]) -> list[tuple[int, int]]:
        """(row, token) of the end tokens of requests below their minimum length."""
        requests = [self._active[request_id].request for request_id in request_ids]
        return [
            (row, end)
            for row, (request, count) in enumerate(zip(requests, counts, strict=True))
            if count < request.min_new_tokens
            for end in request.end_ids
        ]

    def _emit_token(self, request_id: str, token: int, log_probability: float) -> None:
        """Notify the listener of a token, and end the request if it is complete."""
        active, count = self._active[request_id], self._scheduler.record_token(request_id, token)
        is_end = token in active.request.end_ids
        released = active.stops.add("" if is_end else active.detokenize(token))
        if not self._notify(request_id, TokenChunk(request_id, token, log_probability, released.text)):
            return
        if is_end or released.stopped:
            self._end(request_id, FinishReason.STOP)
        elif count >= active.request.max_new_tokens:
            self._end(request_id, FinishReason.LENGTH)

    def _notify(self, request_id: str, event: EngineEvent) -> bool:
        """Call a request's listener; cancel the request if the listener raises."""
        try:
            self._active[request_id].on_event(event)
        except Exception:  # noqa: BLE001  (a caller's own code)
            _LOG.exception("request %s cancelled: its listener raised", request_id)
            self._end(request_id, FinishReason.CANCELLED)
            return False
        return True

    def _end(
        self, request_id: str, reason: FinishReason, *, error: str | None = None, invalidate_prefix: bool = False
    ) -> None:
        active = self._active.pop(request_id)
        completion, cached = self._scheduler.usage(request_id)
        slot = self._scheduler.slot_of(request_id)
        if invalidate_prefix and slot is not None:
            self._runner.clear_slot(slot)
        self._scheduler.finish(request_id, invalidate_prefix=invalidate_prefix)
        self._runner.remove_request(request_id)
        request = active.request
        usage = Usage(len(request.tokens), completion, sum(image.tokens for image in request.images), cached)
        self._notify_end(active, RequestDone(request_id, reason, usage, active.stops.flush(), error))

    def _notify_end(self, active: _ActiveRequest, done: RequestDone) -> None:
        try:
            active.on_event(done)
        except Exception:  # noqa: BLE001  (a caller's own code)
            _LOG.exception("request %s: its listener raised at the last event", done.request_id)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
