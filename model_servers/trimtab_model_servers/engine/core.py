"""The engine without its thread: requests in, one step at a time, pieces and one last word for each out.

A mistake is its request's own: embeddings that do not fit, logits that are no numbers, a token that cannot be drawn or
spelled, a step that fails. A step that fails is computed again part by part, so that only who made it fail ends with
it.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trimtab_model_servers.engine.cuda_graphs import Recorder
from trimtab_model_servers.engine.model_adapters import ModelAdapter
from trimtab_model_servers.engine.model_runner import DecodeLogits, ModelRunner
from trimtab_model_servers.engine.request import FinishReason, Request, RequestDone, RequestError, TokenChunk, Usage
from trimtab_model_servers.engine.sampling import Sampler, TokenProbabilities, chances_of
from trimtab_model_servers.engine.scheduler import Admission, Limits, PrefillChunk, Scheduler
from trimtab_model_servers.engine.stop_strings import Spell, StopFilter

_LOG = logging.getLogger(__name__)

Event = TokenChunk | RequestDone
Tell = Callable[[Event], None]


@dataclass(slots=True)
class _ActiveRequest:
    """One request's conversation."""

    request: Request
    tell: Tell
    sampler: Sampler
    spell: Spell
    stops: StopFilter


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is in flight. All but ``steps`` return to 0 when nothing is."""

    waiting: int = 0
    running: int = 0
    busy_slots: int = 0
    pending_tokens: int = 0
    held: int = 0
    embedding_bytes: int = 0
    steps: int = 0


class EngineCore:
    """Scheduler, executor and conversations; called by one thread at a time."""

    def __init__(
        self,
        family: ModelAdapter,
        limits: Limits,
        *,
        spelling: Callable[[], Spell] | None = None,
        share_prefixes: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        """Make an engine for ``family``.

        ``spelling`` starts to turn one answer's tokens into text (none: no text); ``recorder`` records steps (None: as
        the device of the model has it).
        """
        self.limits = limits
        self._executor = ModelRunner(family, limits, recorder)
        self._scheduler = Scheduler(limits, across=family.across, share_prefixes=share_prefixes)
        self._spelling = spelling or (lambda: lambda _: "")
        self._talks: dict[str, _ActiveRequest] = {}
        self._vocabulary = family.vocabulary
        self._steps = 0

    @property
    def gauges(self) -> Gauges:
        """What is in flight."""
        scheduler, executor = self._scheduler, self._executor
        return Gauges(
            scheduler.waiting,
            scheduler.running,
            scheduler.busy_slots,
            scheduler.pending_tokens,
            executor.held,
            executor.embedding_bytes,
            self._steps,
        )

    def submit(self, request: Request, images: Sequence[Tensor | None], tell: Tell) -> None:
        """Take a request in. ``images`` are their embeddings, [tokens, width] each; None for one still encoded.

        Raises:
            RequestError: it can never be served as it is.
            EngineBusy: as many wait already as may.
        """
        if len(images) != len(request.images):
            raise RequestError(f"{len(images)} embeddings for {len(request.images)} images; should be one each")
        self._scheduler.submit(request, tuple(given is not None for given in images))
        try:
            self._executor.hold(request, images)
        except BaseException:
            self._scheduler.finish(request.id)
            raise
        talk = _ActiveRequest(request, tell, Sampler(request.sampling), self._spelling(), StopFilter(request.stops))
        self._talks[request.id] = talk

    def supply(self, request_id: str, embeddings: Mapping[int, Tensor]) -> None:
        """Bring images that were still encoded; what does not fit ends the request. One that is gone stays gone."""
        for image, rows in embeddings.items():
            if request_id not in self._talks:
                return
            try:
                self._executor.supply(request_id, image, rows)
            except (RequestError, IndexError) as error:
                self._end(request_id, FinishReason.ERROR, error=str(error))
            else:
                self._scheduler.image_ready(request_id, image)

    def cancel(self, request_id: str) -> None:
        """Let go of a request and all it holds; its last word says so. One that is gone stays gone."""
        if request_id in self._talks:
            self._end(request_id, FinishReason.CANCELLED)

    def fail(self, request_id: str, error: str) -> None:
        """End a request in error: what it waits for will not come."""
        if request_id in self._talks:
            self._end(request_id, FinishReason.ERROR, error=error)

    def fail_all(self, error: str) -> None:
        """End every request in flight in error."""
        for request_id, talk in list(self._talks.items()):
            try:
                self._end(request_id, FinishReason.ERROR, error=error)
            except Exception:  # noqa: BLE001  (whatever is out of step by now: nobody may wait for ever)
                _LOG.exception("request %s could not be cleared away", request_id)
                usage = Usage(len(talk.request.tokens), 0, sum(image.tokens for image in talk.request.images), 0)
                self._tell_end(talk, RequestDone(request_id, FinishReason.ERROR, usage, "", error))

    def step(self) -> bool:
        """Compute one step; False when there is nothing to compute now."""
        step = self._scheduler.next_step()
        if step is None:
            return False
        self._steps += 1
        for admission in step.admissions:
            self._admit(admission)
        parts = [part for part in step.parts if part.request_id in self._talks]
        if parts:
            self._compute(parts)
        return True

    def _admit(self, admission: Admission) -> None:
        try:
            self._executor.admit(admission)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's alone)
            _LOG.exception("request %s could not be brought into its slot", admission.request.id)
            self._end(admission.request.id, FinishReason.ERROR, error=_why(error), forget=True)

    def _compute(self, parts: Sequence[PrefillChunk]) -> None:
        try:
            written = self._executor.run(parts)
        except Exception as error:  # noqa: BLE001  (whatever it is, only who made it fail ends with it)
            if len(parts) > 1:
                for part in parts:
                    if part.request_id in self._talks:
                        self._compute([part])
                return
            _LOG.exception("request %s made its step fail", parts[0].request_id)
            self._end(parts[0].request_id, FinishReason.ERROR, error=_why(error), forget=True)
            return
        for part in parts:
            self._scheduler.computed(part)
        self._write(written)

    def _write(self, written: DecodeLogits) -> None:
        if not written.request_ids:
            return
        counts = [self._scheduler.usage(request_id)[0] for request_id in written.request_ids]
        chances = chances_of(written.logits, self._barred(written.request_ids, counts))
        # who waits for a first word is told before those who read on
        for row in sorted(range(len(counts)), key=lambda row: counts[row] > 0):
            request_id = written.request_ids[row]
            try:
                self._write_row(request_id, chances, row)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's alone)
                _LOG.exception("request %s could not be written on", request_id)
                if request_id in self._talks:
                    self._end(request_id, FinishReason.ERROR, error=_why(error), forget=True)

    def _write_row(self, request_id: str, chances: TokenProbabilities, row: int) -> None:
        token, log_probability = chances.likeliest[row], chances.log_likeliest[row]
        if not math.isfinite(log_probability):
            self._end(request_id, FinishReason.ERROR, error="the model's logits are no numbers", forget=True)
            return
        talk = self._talks[request_id]
        if talk.request.sampling.temperature > 0:
            token = talk.sampler.draw(chances.logits[row])
            log_probability = float(chances.log_probabilities[row, token])
        self._told(request_id, token, log_probability)

    def _barred(self, request_ids: Sequence[str], counts: Sequence[int]) -> list[tuple[int, int]]:
        """The ends of those who must write on, as (row, token)."""
        asked = [self._talks[request_id].request for request_id in request_ids]
        return [
            (row, end)
            for row, (request, count) in enumerate(zip(asked, counts, strict=True))
            if count < request.min_new_tokens
            for end in request.end_ids
        ]

    def _told(self, request_id: str, token: int, log_probability: float) -> None:
        """Tell a token that was written, and end the answer where it ends."""
        talk, count = self._talks[request_id], self._scheduler.wrote(request_id, token)
        ended = token in talk.request.end_ids
        told = talk.stops.add("" if ended else talk.spell(token))
        if not self._say(request_id, TokenChunk(request_id, token, log_probability, told.text)):
            return
        if ended or told.stopped:
            self._end(request_id, FinishReason.STOP)
        elif count >= talk.request.max_new_tokens:
            self._end(request_id, FinishReason.LENGTH)

    def _say(self, request_id: str, event: Event) -> bool:
        """Tell the caller; one who cannot be told any more is gone, and its request with it."""
        try:
            self._talks[request_id].tell(event)
        except Exception:  # noqa: BLE001  (a caller's own code)
            _LOG.exception("whoever asked for request %s cannot be told; it is cancelled", request_id)
            self._end(request_id, FinishReason.CANCELLED)
            return False
        return True

    def _end(self, request_id: str, ending: FinishReason, *, error: str | None = None, forget: bool = False) -> None:
        talk = self._talks.pop(request_id)
        completion, cached = self._scheduler.usage(request_id)
        slot = self._scheduler.slot_of(request_id)
        if forget and slot is not None:
            self._executor.wipe(slot)
        self._scheduler.finish(request_id, forget=forget)
        self._executor.release(request_id)
        request = talk.request
        usage = Usage(len(request.tokens), completion, sum(image.tokens for image in request.images), cached)
        self._tell_end(talk, RequestDone(request_id, ending, usage, talk.stops.rest(), error))

    def _tell_end(self, talk: _ActiveRequest, done: RequestDone) -> None:
        try:
            talk.tell(done)
        except Exception:  # noqa: BLE001  (a caller's own code)
            _LOG.exception("whoever asked for request %s cannot be told that it ended", done.request_id)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
