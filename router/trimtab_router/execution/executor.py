"""The course of a request through the stages: what of it is where, what runs next, and how it ends. Pure.

A journey ends exactly once, with all it asked for or with a refusal, and takes what is left of it out of every queue
when it does. The router's requests and the simulator's take the same course.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.extensions import EXPECTED_ACCURACY
from trimtab_protocol.tensors import Array
from trimtab_router.execution.response_metadata import response_accuracy, response_parameters
from trimtab_router.refusal import Refusal, failure, invalid, invalid_for
from trimtab_router.request import image_fanout
from trimtab_router.request.graph import Graph, GraphCursor, ReadyStage
from trimtab_router.request.partial_images import ImageSizeCache, PartialImages
from trimtab_router.request.request_options import NO_WISH, RequestOptions, ServiceTerms
from trimtab_router.request.stream_timing import StreamTiming
from trimtab_router.scheduling.generation import prompt_tokens
from trimtab_router.scheduling.interfaces import Clock
from trimtab_router.scheduling.stage_request import ServedRows, StageRequest
from trimtab_router.scheduling.stage_scheduler import StageScheduler

_ROUNDING = 1e-9
MOST_STARVED = 3
"""Times that a request's images are encoded for answers that did not come."""
Listener = Callable[[int, Chunk | LastChunk], None]
"""Is told of a row's next piece."""


class PipelineExecutor:
    """The desks of a pipeline's stages, in the order of its DAG."""

    def __init__(self, graph: Graph, desks: Mapping[str, StageScheduler], clock: Clock) -> None:
        self.desks = desks
        self.teller = graph.teller
        """The stage whose pieces are the answer's; None where answers come whole."""
        self.encoding = tuple(name for name, desk in desks.items() if desk.stage.encodes)
        """The stages that encode images."""
        self.idle: frozenset[str] = frozenset()
        """Those of them that nothing goes to, since who reads what they give reads images itself."""
        self._clock = clock
        self._graph = graph
        self._sizes = ImageSizeCache()
        self._encoders = graph.encoders
        self.writers = {name: (tensor, desks[name].writing) for name, tensor in graph.messages.items()}
        """The input of a request that has the messages, and who knows of prompts; by stage that writes."""
        for name, desk in desks.items():
            desk.set_downstream([desks[follower] for follower in graph.following(name)])
        for name, encoder in self._encoders.items():
            desks[name].layout.feeders.append(desks[encoder])
            desks[name].layout.rearranged = partial(self._rearrange, desks[name], desks[encoder])
            desks[encoder].layout.listeners.append(desks[name].refresh_replicas)
        self._find_idle()

    def _find_idle(self) -> None:
        readers = {encoder: self.desks[name] for name, encoder in self._encoders.items()}
        self.idle = frozenset(
            each for each, desk in readers.items() if desk.stage.excluded_input(desk.variant) == EMBEDDINGS_INPUT
        )

    def _rearrange(self, writer: StageScheduler, encoder: StageScheduler) -> None:
        """Images are encoded apart from now on, or are not: who waits for what will not come begins anew."""
        self._find_idle()
        if encoder.stage.name in self.idle:
            waiting = [piece.work for piece in encoder.queue]
        else:
            waiting = [piece.work for piece in writer.queue if IMAGES_INPUT in piece.work.inputs]
            waiting = [work for work in waiting if EMBEDDINGS_INPUT not in work.inputs]
        for work in dict.fromkeys(waiting):
            if not work.closed:
                work.owner.work_starved(work, counts=False)

    def advance(self, journey: "RequestState") -> None:
        """Queue whatever became runnable; end the journey once nothing is left."""
        if journey.over:
            return
        now, walk = self._clock.now, journey.walk
        for runnable in walk.advance(self.idle):
            if not self._taken(journey, self._work(journey, runnable, now), now):
                return
        if walk.finished and journey.served:
            journey.end()
        elif walk.finished:
            given = ", ".join(walk.inputs)
            journey.work_refused(invalid(f"no stage can run on the inputs given ({given}); send the optional ones too"))

    def _work(self, journey: "RequestState", runnable: ReadyStage, now: float) -> StageRequest:
        stage = self.desks[runnable.stage].stage
        work = StageRequest(
            journey,
            runnable,
            deadline=journey.ends_by if journey.delivery.first_seconds is not None else journey.deadline,
            now=now,
            ends_by=journey.ends_by if runnable.stage == self.teller else None,
            wish=journey.wish,
            accuracy_floor=self._floor_of(journey, runnable.stage) if journey.least_accuracy else 0.0,
            looked_at_again=stage.confidence is not None,
        )
        if runnable.stage in journey.named:
            work.task = journey.wish.task
        writing = self.desks[runnable.stage].writing
        if stage.encodes:
            work.identities = image_fanout.identities(runnable.inputs)
            for name in self._graph.following(stage.name):
                work.read_in(self.desks[name].outlook.prefill_seconds(journey.prompt_tokens.get(name, 0.0)))
        elif writing is not None:
            writing.weigh(work, journey.delivery.images)
        return work

    def _taken(self, journey: "RequestState", work: StageRequest, now: float) -> bool:
        """Queue a work; False where its journey ended instead."""
        desk = self.desks[work.stage]
        refusal = desk.refusal_of(work, now)
        if refusal is not None:
            journey.work_refused(refusal)
            return False
        journey.works[work.stage] = work
        desk.enqueue(work)
        return True

    def images_came(self, journey: "RequestState", encoder: str, start: int, references: Array) -> None:
        """Let who writes begin on what is there of a chat's images, or tell it of more.

        Only of a request of one chat, which shows several images, to replicas that can begin so.
        """
        ahead = journey.ahead
        if ahead is None:
            files = journey.walk.shown(encoder) if self._reads_ahead(encoder) else []
            if len(files) < 2:
                return
            ahead = journey.ahead = PartialImages(files, self._sizes)
        came = ahead.came(start, references)
        if journey.early is not None:
            told = ahead.references()
            if told is not None and not journey.early.closed:
                journey.early.inputs = {**journey.early.inputs, EMBEDDINGS_INPUT: told}
                self.desks[journey.early.stage].arrived(journey.early, came)
        elif ahead.begun and not ahead.whole and not journey.waits_for_all:
            self._begin_early(journey, encoder, ahead.references())

    def _reads_ahead(self, encoder: str) -> bool:
        if encoder in self.idle:
            return False  # what it still encodes is for nobody
        return any(self.desks[name].reads_ahead for name in self._graph.following(encoder))

    def _begin_early(self, journey: "RequestState", encoder: str, references: Array | None) -> None:
        runnable = None if references is None else journey.walk.begin(encoder, references)
        if runnable is not None:
            work = journey.early = self._work(journey, runnable, self._clock.now)
            journey.works[work.stage] = work
            self.desks[work.stage].begin_early(work)

    def all_images_came(self, journey: "RequestState", references: Array) -> None:
        """Tell who began early of the last images; who could not begin yet queues now."""
        work, ahead, now = journey.early, journey.ahead, self._clock.now
        journey.early = None
        if work is None or ahead is None or work.closed:
            return
        work.inputs = {
            **work.inputs,
            EMBEDDINGS_INPUT: image_fanout.join_embeddings({EMBEDDINGS_INPUT: references}, 1)[EMBEDDINGS_INPUT],
        }
        if not self.desks[work.stage].all_arrived(work, ahead.came(0, references)):
            work.enqueued_at = now
            self._taken(journey, work, now)

    def refusal_of(self, wish: RequestOptions, walk: GraphCursor, named: Collection[str] = ()) -> Refusal | None:
        """Why what a request wishes cannot be granted by the plan in force; None where it can.

        Args:
            wish: what it wishes.
            walk: where it stands.
            named: the stages whose models have the task that it names.
        """
        if wish is NO_WISH or wish.plain:
            return None
        known = sorted({task for desk in self.desks.values() for task in desk.outlook.tasks()})
        if wish.task and not named and wish.task not in known:
            there_are = f"the plan in force knows: {', '.join(known)}" if known else "the plan in force knows none"
            return invalid(f"unknown task {wish.task!r}; {there_are}")
        best, least = self._best_accuracy(wish, walk, walk.ahead), wish.least_accuracy(walk.rows)
        if least <= best + _ROUNDING:
            return None
        wished = f"an accuracy of {wish.accuracy_floor:g}"
        if wish.accuracy_probability is not None:
            wished += f" with probability {wish.accuracy_probability:g}, which needs {least:.4f} on average,"
        message = f"{wished} is more than the plan in force can give; the best possible is {best:.4f}"
        if self._lacking(walk):
            message += f" from the inputs given ({', '.join(walk.inputs)})"
        return invalid_for("AccuracyFloor", message)

    def _floor_of(self, journey: "RequestState", stage: str) -> float:
        """The least accuracy of a stage that lets the journey keep its floor, if the others ahead do their best."""
        others = [name for name in journey.walk.ahead if name != stage]
        best = self._best_accuracy(journey.wish, journey.walk, others)
        return journey.least_accuracy / max(journey.accuracy * best, _ROUNDING)

    def _best_accuracy(self, wish: RequestOptions, walk: GraphCursor, stages: Iterable[str]) -> float:
        desks = (self.desks[stage] for stage in stages)
        return prod(desk.outlook.best_accuracy(wish.task, walk.given(desk.stage)) for desk in desks)

    def _lacking(self, walk: GraphCursor) -> bool:
        """Whether a stage ahead lacks an input that it could read."""
        stages = [self.desks[name].stage for name in walk.ahead]
        return any(len(walk.given(stage)) < len(stage.inputs) for stage in stages)

    def withdraw(self, works: Mapping[str, StageRequest]) -> None:
        """Free what is left of these, by stage."""
        for stage, work in works.items():
            self.desks[stage].cancel(work)

    def forget(self, kept: Mapping[str, Array]) -> None:
        """Free what replicas keep of images, by the stage that encoded them."""
        for stage, references in kept.items():
            self.desks[stage].release_embeddings(references)


class RequestState:
    """The state of one request.

    Args:
        course: what it goes through.
        walk: where it stands in the DAG.
        terms: on which it is served.
        arrived_at: in seconds of the course's clock.
        ended: called once, when it ends; `refusal` says how.
        hold: told of the bytes of each stage's outputs, which are kept until the journey ends; None if nobody asks.
        request_id: passed on as `x-request-id`.
        trace_parent: passed on as `traceparent`.
        listener: is told of each piece of the rows of an answer that is written; None if nobody listens.
        images: how many it shows.
        named: the stages whose models have the task that it names.
    """

    waits = True
    __slots__ = (
        "_course",
        "_ended",
        "_hold",
        "_listener",
        "ahead",
        "arrived_at",
        "deadline",
        "delivery",
        "early",
        "ends_by",
        "kept",
        "least_accuracy",
        "listens",
        "named",
        "over",
        "prompt_tokens",
        "refusal",
        "request_id",
        "rows_by_stage",
        "served",
        "starved",
        "trace_parent",
        "waits_for_all",
        "walk",
        "wish",
        "works",
    )

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        course: PipelineExecutor,
        walk: GraphCursor,
        terms: ServiceTerms,
        *,
        arrived_at: float,
        ended: "Callable[[RequestState], None]",
        hold: Callable[[int], None] | None = None,
        request_id: str = "",
        trace_parent: str = "",
        listener: "Listener | None" = None,
        images: int = 0,
        named: Collection[str] = (),
    ) -> None:
        wish, self.deadline, ends_by = terms
        self.delivery = StreamTiming(arrived_at, images)
        """When the pieces of its answer came, where it is written."""
        self.ends_by = self.deadline if ends_by is None else ends_by
        self.listens = listener is not None
        self._listener = listener
        self.walk = walk
        self.wish = wish
        self.named = named
        self.least_accuracy = wish.least_accuracy(walk.rows) if wish.accuracy_floor else 0.0
        """Expected of its answer at the least."""
        self.arrived_at = arrived_at
        self.request_id = request_id
        self.trace_parent = trace_parent
        self.over = False
        self.refusal: Refusal | None = None
        """Why it ended without a result."""
        self.works: dict[str, StageRequest] = {}
        self.kept: dict[str, Array] = {}
        """Where replicas keep what they made of its images, until it is pulled; by stage."""
        self.starved = 0
        """How often that was lost."""
        self.ahead: PartialImages | None = None
        """Its images, where some of several are encoded and who writes can begin on them."""
        self.early: StageRequest | None = None
        """What was begun on them."""
        self.waits_for_all = False
        """Whether nothing is begun any more before all are encoded: that was lost once."""
        self.served: dict[str, Sequence[ServedRows]] = {}
        self.rows_by_stage = dict.fromkeys(course.encoding, images * walk.rows)
        """Those of images count where nobody encodes them, too: the plan asks how many chats show."""
        self.prompt_tokens = prompt_tokens(course.writers, walk.inputs, images) if course.writers else {}
        """Of its prompts on average, by who writes, as far as is known when it comes."""
        self._course = course
        self._ended = ended
        self._hold = hold

    def work_written(self, work: StageRequest, row: int, piece: Chunk | LastChunk, now: float) -> None:
        """Note a piece of the answer, and tell whoever listens."""
        if work.stage != self._course.teller:
            return
        self.delivery.note(row, piece, now)
        if self._listener is not None:
            self._listener(row, piece)

    def work_advanced(self, work: StageRequest, start: int, outputs: Mapping[str, Array]) -> None:
        """Note images that are encoded while others of the request are not."""
        if self.over or not self._course.desks[work.stage].stage.encodes:
            return
        came, known = outputs[EMBEDDINGS_INPUT], self.kept.get(work.stage)
        self.kept[work.stage] = came if known is None else np.concatenate([known, came])
        self._course.images_came(self, work.stage, start, came)

    def work_completed(self, work: StageRequest, outputs: Mapping[str, Array], served: Sequence[ServedRows]) -> None:
        """Go on after a stage."""
        del self.works[work.stage]
        stage = self._course.desks[work.stage].stage
        if stage.encodes:
            self.kept[work.stage] = outputs[EMBEDDINGS_INPUT]
            if self.early is None:
                self._course.images_came(self, work.stage, 0, outputs[EMBEDDINGS_INPUT])
        elif self.kept and any(stage.excluded_input(piece.variant) == EMBEDDINGS_INPUT for piece in served):
            self._free_kept()  # whoever answered has read the images themselves
        self.served[work.stage] = served
        self.rows_by_stage[work.stage] = work.rows
        if self._hold is not None:
            self._hold(sum(array.nbytes for array in outputs.values()))
        self.walk.complete(work.stage, outputs)
        if stage.encodes:
            self._course.all_images_came(self, outputs[EMBEDDINGS_INPUT])
        self._course.advance(self)

    def work_starved(self, work: StageRequest, *, counts: bool) -> None:
        """Have the images encoded again that a stage was to pull; who has read a part of the answer gets no other."""
        self.starved += counts
        if self.starved >= MOST_STARVED or (self.listens and self.delivery.first_seconds is not None):
            what = f"stage {work.stage}: what was made of its images was lost {self.starved} times"
            self.work_refused(failure("ModelServerError", what, self.request_id, stage=work.stage))
            return
        begun = self.early if self.early is not None and not self.early.closed else work
        again = self.walk.reopen(begun.stage)
        self._course.withdraw({stage: found for stage in again if (found := self.works.pop(stage, None)) is not None})
        work.close()
        self._free_kept()
        self.ahead = self.early = None
        self.waits_for_all = True
        self._course.advance(self)

    def _free_kept(self) -> None:
        kept, self.kept = self.kept, {}
        self._course.forget(kept)

    def work_refused(self, refusal: Refusal) -> None:
        """End without a result."""
        if not self.over:
            self.refusal = refusal
            self.end()

    def end(self) -> None:
        """End, and say so."""
        self.leave()
        self._ended(self)

    def leave(self) -> None:
        """Nobody waits for it any more: free what it still has in queues."""
        self.over = True
        self._course.withdraw(self.works)
        self.works = {}
        if self.kept and not self.walk.finished:
            self._free_kept()

    def in_time(self, now: float, slo: ServiceLevel) -> bool:
        """Whether its answer, whole now, keeps the promise: by its first piece and its pace where it was written."""
        if self.delivery.first_seconds is None:
            return now <= self.deadline
        begun_by = self.deadline - self.arrived_at
        return now <= self.ends_by and self.delivery.first_seconds <= begun_by and self.delivery.keeps(slo)

    @property
    def accuracy(self) -> float:
        """Expected accuracy of what served it."""
        return response_accuracy(self.served, self.rows_by_stage)

    def parameters(self) -> dict[str, bool | str | int | float]:
        """What served it, for the answer."""
        return response_parameters(self.served, dict.fromkeys(self.named, self.wish.task)) | {
            EXPECTED_ACCURACY: round(self.accuracy, 6)
        }
