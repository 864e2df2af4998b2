"""`PipelineExecutor` and `RequestState`: execution of requests by stages, in the router and the simulator."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import attrgetter

import numpy as np

from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT
from trimtab_protocol.chat.engine_routes import ForwardedRequest
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.extensions import EXPECTED_ACCURACY
from trimtab_protocol.tensors import Array
from trimtab_router.execution import chat_images
from trimtab_router.execution.chat_images import ImageSizeCache, PartialImages
from trimtab_router.execution.confidence_shifts import ConfidenceShifts
from trimtab_router.execution.graph import Graph, GraphCursor, ReadyStage
from trimtab_router.execution.response_metadata import StreamTiming, response_accuracy, response_parameters
from trimtab_router.refusal import Refusal, failure, invalid
from trimtab_router.request import Call, RequestOptions
from trimtab_router.scheduling.interfaces import Clock
from trimtab_router.scheduling.prompt_lengths import mean_prompt_tokens
from trimtab_router.scheduling.roles import EncodeScheduler, GenerationScheduler
from trimtab_router.scheduling.stage_request import ServedRows, StageRequest
from trimtab_router.scheduling.stage_scheduler import StageScheduler

_ROUNDING = 1e-9
_BYTES = attrgetter("nbytes")
MAX_EMBEDDING_LOSSES = 3  # number of times that a request's embeddings may be lost before it fails


class PipelineExecutor:
    """Schedulers of a pipeline's stages, in the order of its DAG."""

    def __init__(self, graph: Graph, schedulers: Mapping[str, StageScheduler], clock: Clock) -> None:
        self.schedulers = schedulers
        self.streaming_stage = graph.streaming_stage
        self.encode_schedulers = {
            name: scheduler for name, scheduler in schedulers.items() if isinstance(scheduler, EncodeScheduler)
        }
        self._generation_schedulers = {
            name: scheduler for name, scheduler in schedulers.items() if isinstance(scheduler, GenerationScheduler)
        }
        self._chat_stages = frozenset(name for name, scheduler in schedulers.items() if scheduler.stage.serves_chats)
        self.idle_stages: frozenset[str] = frozenset()  # encoders while planned variants encode themselves
        self._clock = clock
        self._graph = graph
        self._sizes = ImageSizeCache()
        self._confidence_shifts = ConfidenceShifts(scheduler.stage for scheduler in schedulers.values())
        self._encoders = graph.encoders
        self.prompt_sources = {
            name: (tensor, self._generation_schedulers[name].prompt_lengths)
            for name, tensor in graph.message_inputs.items()
        }
        """For each generation stage: the request input with the chat messages, and its generation tracker."""
        for name, scheduler in schedulers.items():
            scheduler.set_downstream([schedulers[follower] for follower in graph.downstream(name)])
        for name, encoder in self._encoders.items():
            selection = schedulers[name].replica_selection
            selection.encoders.append(schedulers[encoder])
            selection.on_placement_change = partial(self._on_placement_change, schedulers[name], schedulers[encoder])
            schedulers[encoder].replica_selection.readiness_listeners.append(schedulers[name].refresh_replicas)
        self._find_idle_stages()

    def _find_idle_stages(self) -> None:
        readers = {encoder: self.schedulers[name] for name, encoder in self._encoders.items()}
        self.idle_stages = frozenset(
            encoder
            for encoder, scheduler in readers.items()
            if scheduler.stage.excluded_input(scheduler.variant) == EMBEDDINGS_INPUT
        )

    def _on_placement_change(self, generator: StageScheduler, encoder: StageScheduler) -> None:
        """Restart queued requests whose images would not be encoded after the change between colocated and separate."""
        self._find_idle_stages()
        if encoder.stage.name in self.idle_stages:
            requests = [row_slice.request for row_slice in encoder.queue]
        else:
            requests = [row_slice.request for row_slice in generator.queue]
            requests = [
                request
                for request in requests
                if IMAGES_INPUT in request.inputs and EMBEDDINGS_INPUT not in request.inputs
            ]
        for request in dict.fromkeys(requests):
            if not request.closed:
                request.owner.on_embeddings_lost(request, counts=False)

    def advance(self, state: "RequestState") -> None:
        """Enqueue the stages that became ready. End the request if none is left."""
        if state.done:
            return
        ready_stages = state.cursor.advance(self.idle_stages)
        if ready_stages:
            now = self._clock.now
            for ready in ready_stages:
                if not self._enqueue(state, self._create_request(state, ready, now), now):
                    return
        elif not state.cursor.finished:
            return
        elif state.served:
            state.end()
        else:
            names = ", ".join(state.cursor.inputs)
            state.on_refused(invalid(f"no stage can run on the inputs given ({names}); send the optional ones too"))

    def _create_request(self, state: "RequestState", ready: ReadyStage, now: float) -> StageRequest:
        stage = self.schedulers[ready.stage].stage
        streaming = state.stream is not None and state.stream.time_to_first_token is not None
        request = StageRequest(
            state,
            *ready,
            deadline=state.completion_deadline if streaming else state.deadline,
            now=now,
            options=state.options,
            accuracy_floor=self._stage_accuracy_floor(state, ready.stage) if state.min_accuracy else 0.0,
        )
        if stage.confidence is not None:
            request.special = True
            request.confidence_shift = self._confidence_shifts.of(ready.stage, state.served)
        if ready.stage in state.task_stages:
            request.task = state.options.task
        if ready.stage not in self._chat_stages:
            return request
        request.tenant = state.call.client
        if ready.stage == self.streaming_stage:
            request.completion_deadline = state.completion_deadline
        if ready.stage in self.encode_schedulers:
            request.identities = chat_images.image_identities(ready.inputs, state.call.client)
            for name in self._graph.downstream(stage.name):
                tokens = state.prompt_tokens.get(name, 0.0)
                request.set_prefill_seconds(self.schedulers[name].latency_model.prefill_seconds(tokens))
        elif ready.stage in self._generation_schedulers and state.forwarded is None:
            self._generation_schedulers[ready.stage].estimate_prompts(request, state.call.images)
        return request

    def _enqueue(self, state: "RequestState", request: StageRequest, now: float) -> bool:
        scheduler = self.schedulers[request.stage]
        refusal = scheduler.refusal_of(request, now)
        if refusal is not None:
            state.on_refused(refusal)
            return False
        state.stage_requests[request.stage] = request
        scheduler.enqueue(request)
        return True

    def on_images_encoded(self, state: "RequestState", encoder: str, start: int, references: Array) -> None:
        """Start the prefill of a partly encoded single chat, or send it more images."""
        images = state.partial_images
        if images is None:
            files = state.cursor.chat_images(encoder) if self._accepts_partial_images(encoder) else []
            if len(files) < 2:
                return
            images = state.partial_images = PartialImages(files, self._sizes)
        added = images.add(start, references)
        if state.early_request is not None:
            announced = images.references()
            if announced is not None and not state.early_request.closed:
                state.early_request.inputs = {**state.early_request.inputs, EMBEDDINGS_INPUT: announced}
                self._generation_schedulers[state.early_request.stage].add_images(state.early_request, added)
        elif images.has_first and not images.complete and not state.awaits_all_images:
            self._start_early_prefill(state, encoder, images.references())

    def _accepts_partial_images(self, encoder: str) -> bool:
        if encoder in self.idle_stages:
            return False
        readers = self._graph.downstream(encoder)
        return any(self._generation_schedulers[name].supports_partial_prefill for name in readers)

    def _start_early_prefill(self, state: "RequestState", encoder: str, references: Array | None) -> None:
        ready = None if references is None else state.cursor.start_early(encoder, references)
        if ready is not None:
            request = state.early_request = self._create_request(state, ready, self._clock.now)
            state.stage_requests[request.stage] = request
            self._generation_schedulers[request.stage].start_early_prefill(request)

    def on_all_images_encoded(self, state: "RequestState", references: Array) -> None:
        """Send the last images to an early prefill, or enqueue its request if it has not started."""
        request, images, now = state.early_request, state.partial_images, self._clock.now
        state.early_request = None
        if request is None or images is None or request.closed:
            return
        joined = chat_images.join_embeddings({EMBEDDINGS_INPUT: references}, 1)
        request.inputs = {**request.inputs, EMBEDDINGS_INPUT: joined[EMBEDDINGS_INPUT]}
        if not self._generation_schedulers[request.stage].complete_images(request, images.add(0, references)):
            request.enqueued_at = now
            self._enqueue(state, request, now)

    def _stage_accuracy_floor(self, state: "RequestState", stage: str) -> float:
        """Minimum accuracy of a stage that keeps the request's floor if the other remaining stages do their best."""
        others = [name for name in state.cursor.remaining_stages if name != stage]
        best = self.best_accuracy(state.options, state.cursor, others)
        return state.min_accuracy / max(state.accuracy * best, _ROUNDING)

    def best_accuracy(self, options: RequestOptions, cursor: GraphCursor, stages: Iterable[str]) -> float:
        schedulers = (self.schedulers[stage] for stage in stages)
        return prod(
            scheduler.latency_model.best_accuracy(options.task, cursor.available_inputs(scheduler.stage))
            for scheduler in schedulers
        )

    def cancel(self, requests: Mapping[str, StageRequest]) -> None:
        for stage, request in requests.items():
            self.schedulers[stage].cancel(request)

    def release_embeddings(self, embeddings: Mapping[str, Array]) -> None:
        for stage, references in embeddings.items():
            self.encode_schedulers[stage].release_embeddings(references)


@dataclass(eq=False)
class RequestState:
    """State of one request. `on_end` is called once when it ends. Without slots, defaults stay with the class."""

    executor: PipelineExecutor
    call: Call
    cursor: GraphCursor
    options: RequestOptions
    """Options of the request, with those of its task applied."""
    task_stages: Collection[str]
    """Stages whose models have the task that the request names."""
    deadline: float
    """Of a streamed response's first token, in seconds of the executor's clock."""
    completion_deadline: float
    on_end: "Callable[[RequestState], None]"
    has_client = True
    has_listener: bool = field(init=False)
    forwarded: ForwardedRequest | None = field(init=False)
    arrived_at: float = field(init=False)
    request_id: str = field(init=False)
    trace_parent: str = field(init=False)
    min_accuracy: float = field(init=False)
    """Minimum expected accuracy of the response."""
    done: bool = field(default=False, init=False)
    refusal: Refusal | None = field(default=None, init=False)
    """Why the request ended without a result."""
    stage_requests: dict[str, StageRequest] = field(default_factory=dict)
    served: dict[str, Sequence[ServedRows]] = field(default_factory=dict)
    stream: StreamTiming | None = field(default=None, init=False)
    """None if responses are not streamed."""
    rows_by_stage: dict[str, int] = field(init=False)
    """Images count even if their encoder is idle, for the planner."""
    prompt_tokens: dict[str, float] = field(init=False)
    """Mean, by generation stage, if known at arrival."""
    embeddings: dict[str, Array] = field(default_factory=dict)
    """References to stored ones, by encoder stage."""
    embedding_losses: int = field(default=0, init=False)
    """Number of times that its embeddings were lost."""
    partial_images: PartialImages | None = field(default=None, init=False)
    """Its images while only some of them are encoded."""
    early_request: StageRequest | None = field(default=None, init=False)
    """Early prefill on these images."""
    _accuracy: float | None = field(default=None, init=False)
    """Of the stages served so far, once it is known."""
    awaits_all_images: bool = field(default=False, init=False)
    """Whether no early prefill is started, because embeddings were lost before."""

    def __post_init__(self) -> None:
        call, rows, sources = self.call, self.cursor.rows, self.executor.prompt_sources
        self.has_listener, self.arrived_at = call.listener is not None, call.arrived_at
        self.forwarded = call.forwarded
        self.request_id, self.trace_parent = call.request_id, call.trace_parent
        self.min_accuracy = self.options.min_accuracy(rows) if self.options.accuracy_floor else 0.0
        if self.executor.streaming_stage is not None:
            self.stream = StreamTiming(call.arrived_at, call.images)
        self.rows_by_stage = dict.fromkeys(self.executor.encode_schedulers, call.images * rows)
        self.prompt_tokens = (
            mean_prompt_tokens(sources, self.cursor.inputs, call.images) if sources and not self.forwarded else {}
        )

    def on_chunk(self, request: StageRequest, row: int, chunk: Chunk | LastChunk, now: float) -> None:
        if self.stream is None or request.stage != self.executor.streaming_stage:
            return
        self.stream.record(row, chunk, now)
        self.call.variant = request.variant
        if self.call.listener is not None:
            self.call.listener(row, chunk)
        if self.call.last_chunks is not None and isinstance(chunk, LastChunk):
            self.call.last_chunks[row] = chunk

    def on_rows_completed(self, request: StageRequest, start: int, outputs: Mapping[str, Array]) -> None:
        if self.done or request.stage not in self.executor.encode_schedulers:
            return
        references, earlier = outputs[EMBEDDINGS_INPUT], self.embeddings.get(request.stage)
        self.embeddings[request.stage] = references if earlier is None else np.concatenate([earlier, references])
        self.executor.on_images_encoded(self, request.stage, start, references)

    def on_completed(self, request: StageRequest, outputs: Mapping[str, Array], served: Sequence[ServedRows]) -> None:
        del self.stage_requests[request.stage]
        stage = self.executor.schedulers[request.stage].stage
        encodes = request.stage in self.executor.encode_schedulers
        if encodes:
            self.embeddings[request.stage] = outputs[EMBEDDINGS_INPUT]
            if self.early_request is None:
                self.executor.on_images_encoded(self, request.stage, 0, outputs[EMBEDDINGS_INPUT])
        elif self.embeddings and any(stage.excluded_input(rows.variant) == EMBEDDINGS_INPUT for rows in served):
            self._release_embeddings()  # the variant that served has encoded the images itself
        self.served[request.stage] = served
        self._accuracy = None
        self.rows_by_stage[request.stage] = request.rows
        if self.call.hold_bytes is not None:
            self.call.hold_bytes(sum(map(_BYTES, outputs.values())))
        self.cursor.complete(request.stage, outputs)
        if encodes:
            self.executor.on_all_images_encoded(self, outputs[EMBEDDINGS_INPUT])
        self.executor.advance(self)

    def on_embeddings_lost(self, request: StageRequest, *, counts: bool) -> None:
        """Encode the images again, unless a part of the response has been streamed or too many attempts failed."""
        self.embedding_losses += counts
        started = self.has_listener and self.stream is not None and self.stream.time_to_first_token is not None
        if self.embedding_losses >= MAX_EMBEDDING_LOSSES or started:
            message = f"stage {request.stage}: the embeddings of its images were lost {self.embedding_losses} times"
            self.on_refused(failure("ModelServerError", message, self.request_id, stage=request.stage))
            return
        early = self.early_request
        reopened = self.cursor.reopen((early if early is not None and not early.closed else request).stage)
        requests = {stage: self.stage_requests.pop(stage) for stage in reopened if stage in self.stage_requests}
        self.executor.cancel(requests)
        request.close()
        self._release_embeddings()
        self.partial_images = self.early_request = None
        self.awaits_all_images = True
        self.executor.advance(self)

    def _release_embeddings(self) -> None:
        embeddings, self.embeddings = self.embeddings, {}
        self.executor.release_embeddings(embeddings)

    def on_refused(self, refusal: Refusal) -> None:
        if not self.done:
            self.refusal = refusal
            self.end()

    def end(self) -> None:
        self.release()
        self.on_end(self)

    def release(self) -> None:
        self.done = True
        if self.stage_requests:
            self.executor.cancel(self.stage_requests)
            self.stage_requests = {}
        if self.embeddings and not self.cursor.finished:
            self._release_embeddings()

    def met_slo(self, now: float, slo: ServiceLevel) -> bool:
        """Whether the response, complete now, meets its deadlines and a streamed one the SLO of its tokens."""
        first_token = None if self.stream is None else self.stream.time_to_first_token
        if self.stream is None or first_token is None:
            return now <= self.deadline
        in_time = now <= self.completion_deadline and first_token <= self.deadline - self.arrived_at
        return in_time and self.stream.meets(slo)

    @property
    def accuracy(self) -> float:
        if self._accuracy is None:
            self._accuracy = response_accuracy(self.served, self.rows_by_stage)
        return self._accuracy

    def response_parameters(self) -> dict[str, bool | str | int | float]:
        tasks = dict.fromkeys(self.task_stages, self.options.task)
        parameters = response_parameters(self.served, tasks)
        parameters[EXPECTED_ACCURACY] = round(self.accuracy, 6)
        return parameters
