"""Open-loop attack: sends requests when they are due and records the outcome of each.

Arrivals and payloads are computed before the clock starts. Latency counts from the scheduled arrival; the summary
reports the delay of an overloaded client as `client_lateness_seconds_p99`.
"""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.arrivals import Seconds, poisson_arrivals
from trimtab_loadtester.chat_client import ChatClient
from trimtab_loadtester.clients import OPEN, Access, Client, ClientResponse, RestClient
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.multimodal.traffic import draw
from trimtab_loadtester.payloads.interface import Payload, PayloadSource
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_loadtester.payloads.lmm_digits import DrawnChats
from trimtab_loadtester.payloads.sources import payload_source, require_chats
from trimtab_loadtester.results import ClientTimings, Record, Results, RunFacts, StageVisit, classify
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import event_loop
from trimtab_protocol.extensions import (
    ACCURACY_FLOOR,
    EXPECTED_ACCURACY,
    REASON_HEADER,
    STAGE_HEADER,
    parameters_of,
    parse_number,
)

GAVE_UP = "GaveUp"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ClientProtocol = Literal["REST", "gRPC", "chat"]


def _grpc_client(address: str, model: str, access: Access) -> Client:
    from trimtab_loadtester.grpc_client import GrpcClient  # noqa: PLC0415  (a process that sends no load needs no gRPC)

    return GrpcClient(address, model, access)


CLIENTS: Mapping[ClientProtocol, Callable[[str, str, Access], Client]] = {
    "REST": RestClient,
    "gRPC": _grpc_client,
    "chat": ChatClient,
}
_MAX_VISIT_VALUE = 2**31 - 1
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run; `correct` and `total` sum the scores of the responses so far."""

    elapsed_seconds: float
    duration_seconds: float
    scheduled: int
    sent: int
    outcomes: Mapping[RequestOutcome, int]
    correct: int = 0
    total: int = 0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class AttackOptions:
    """Options of a run."""

    protocol: ClientProtocol = "REST"
    """REST sends binary tensors, chat streams OpenAI chats; the address is the router's port of this protocol."""
    duration_seconds: float | None = None
    """None sends the load once, to its end."""
    seed: int = 0
    """Seed of arrivals and payloads."""
    deadline_seconds: float | None = None
    """Sent with each request as `timeout`; None leaves the deadline to the pipeline's SLO."""
    give_up_seconds: float = 60.0
    """Timeout of a request after it is sent; it then counts as failed."""
    max_outstanding: int = 4096
    """Requests in flight; requests over the limit wait, and their latency includes the wait."""
    max_payloads: int = 8192
    """Number of distinct payloads; requests use them in rotation."""
    max_payload_bytes: int = 256 * 2**20
    """Total size of the encoded payloads; fewer payloads are prepared above it."""
    cores: frozenset[int] | None = None
    """CPU affinity of the process; None leaves it unchanged."""
    progress_seconds: float = 0.5
    """Interval of progress reports."""
    access: Access = OPEN
    samples: str | None = None
    """Path or `module:Class` of labelled samples; None sends the payloads that the pipeline names."""


@dataclass(slots=True)
class _Run:
    """State of a run."""

    arrivals: Seconds
    payloads: Sequence[Payload]
    encoded: Sequence[Any]
    images: Sequence[int]
    source: PayloadSource
    facts: RunFacts
    options: AttackOptions
    client: Client
    stop: asyncio.Event
    start: float = 0.0
    """Event loop time of second 0."""
    sent: int = 0
    records: list[Record] = field(default_factory=list)
    outcomes: dict[RequestOutcome, int] = field(default_factory=lambda: dict.fromkeys(RequestOutcome, 0))
    correct: int = 0
    total: int = 0

    @property
    def elapsed_seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.start


def attack(
    pipeline: InferencePipeline,
    address: str,
    load: LoadSpec,
    options: AttackOptions | None = None,
    on_progress: OnProgress | None = None,
    on_signal: Callable[[signal.Signals], None] | None = None,
) -> Results:
    """Send a load to a pipeline at `address` (host:port) and block until every response is received.

    Ctrl-C or SIGTERM stops sending and calls `on_signal`; requests in flight are still awaited and reported. Call it in
    the main thread of a separate process, so that client and server do not delay each other's event loop. Raises
    LoadError if the load has no end and no duration is given. Raises ValueError if the payloads are unknown, or the
    load has too many requests for one run.
    """
    options = options or AttackOptions()
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)

    async def until_signalled() -> Results:
        stop = asyncio.Event()

        def stop_sending(number: signal.Signals) -> None:
            if on_signal is not None:
                on_signal(number)
            stop.set()

        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop_sending, number)
        return await attack_async(pipeline, address, load, options, on_progress, stop)

    return event_loop.run(until_signalled())


async def attack_async(
    pipeline: InferencePipeline,
    address: str,
    load: LoadSpec,
    options: AttackOptions | None = None,
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
    *,
    source: PayloadSource | None = None,
    arrivals: Seconds | None = None,
) -> Results:
    """Send a load like `attack`, in a running event loop, until `stop` is set.

    `source` replaces the payloads that the pipeline or the options name. `arrivals` are due times in seconds,
    ascending; None draws them from the load.
    """
    options = options or AttackOptions()
    rates = load.rates(options.duration_seconds)
    duration_seconds = options.duration_seconds or float(rates.size)
    client = CLIENTS[options.protocol](address, pipeline.name, options.access)
    if load.traffic is not None:
        require_chats(pipeline, load.text, options.samples)
        drawn = draw(load.traffic.during(duration_seconds), options.seed)
        requests = [request for request in drawn if request.arrival_seconds < duration_seconds]
        arrivals = np.array([request.arrival_seconds for request in requests])
        source = DrawnChats(requests, options.seed)
    elif arrivals is None:
        arrivals = poisson_arrivals(rates, options.seed, duration_seconds)
    if source is not None:
        pass
    elif options.samples is None:
        source = payload_source(pipeline, options.seed)
    else:
        source = LabelledPayloads(pipeline, options.samples, options.seed)
    payloads, encoded, images = _prepare(pipeline, source, client, arrivals.size, options)
    facts = RunFacts(
        pipeline=pipeline.name,
        load=load.text,
        duration_seconds=duration_seconds,
        slo_seconds=pipeline.spec.slo.latency_seconds,
        first_token_slo_seconds=pipeline.spec.slo.time_to_first_token_seconds,
        between_tokens_slo_seconds=pipeline.spec.slo.time_per_output_token_seconds,
        stages=tuple(stage.name for stage in pipeline.spec.ordered_stages),
        started_at=time.time(),
        gap_seconds=load.gap_seconds,
        distinct_payloads=len(payloads),
        streamed=options.protocol == "chat",
    )
    async with client:
        run = _Run(arrivals, payloads, encoded, images, source, facts, options, client, stop or asyncio.Event())
        return await _execute(run, on_progress)


def _prepare(
    pipeline: InferencePipeline, source: PayloadSource, client: Client, requests: int, options: AttackOptions
) -> tuple[list[Payload], list[Any], list[int]]:
    """Encode payloads, one a request up to the limits of the options, and count the images of each."""
    names = tuple(output.name for output in pipeline.spec.outputs)
    parameters = {} if options.deadline_seconds is None else {"timeout": round(options.deadline_seconds * 1e6)}
    payloads: list[Payload] = []
    encoded: list[Any] = []
    images: list[int] = []
    size = 0
    while len(payloads) < min(requests, options.max_payloads) and size < options.max_payload_bytes:
        payload = source.payload(len(payloads))
        encoded.append(client.encode(payload.inputs, names, {**parameters, **payload.parameters}))
        size += client.encoded_bytes(encoded[-1])
        images.append(payload.images)
        payloads.append(replace(payload, inputs=()))
    return payloads, encoded, images


async def _execute(run: _Run, on_progress: OnProgress | None) -> Results:
    gc.collect()
    gc.freeze()  # payloads live until the end; a collection that traverses them would delay requests
    try:
        run.start = asyncio.get_running_loop().time()
        run.facts = replace(run.facts, started_at=time.time())
        reporter = asyncio.create_task(_report_progress(run, on_progress)) if on_progress else None
        await _send_all(run)
        if reporter is not None and on_progress is not None:
            reporter.cancel()
            with suppress(asyncio.CancelledError):
                await reporter
            on_progress(_progress(run))
    finally:
        gc.unfreeze()
    return Results.of(run.facts, run.records)


async def _send_all(run: _Run) -> None:
    """Start each request when it is due and wait for the last response."""
    slots = asyncio.Semaphore(run.options.max_outstanding)
    async with asyncio.TaskGroup() as group:
        for index, due in enumerate(run.arrivals.tolist()):
            if (wait := due - run.elapsed_seconds) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await run.stop.wait()
            await slots.acquire()
            if run.stop.is_set():
                run.facts = replace(run.facts, interrupted=True, duration_seconds=run.elapsed_seconds)
                return
            group.create_task(_request(run, index, due)).add_done_callback(lambda _: slots.release())


async def _request(run: _Run, index: int, due: float) -> None:
    sent = run.elapsed_seconds
    run.sent += 1
    number = index % len(run.payloads)
    try:
        async with asyncio.timeout(run.options.give_up_seconds):
            response = await run.client.send(run.encoded[number], f"{run.options.seed}-{index}")
    except TimeoutError:
        response = ClientResponse(GAVE_UP, detail=f"no response within {run.options.give_up_seconds:g} s")
    except Exception as error:  # noqa: BLE001 - any error fails this request alone
        response = ClientResponse(type(error).__name__, detail=str(error))
    record = _record(run, number, response, due, sent)
    run.records.append(record)
    run.outcomes[record.outcome] += 1
    run.correct += record.correct
    run.total += record.total


def _record(run: _Run, number: int, response: ClientResponse, due: float, sent: float) -> Record:
    payload, latency = run.payloads[number], run.elapsed_seconds - due
    stream = response.stream_timings
    first_token, between = (
        (sent - due + stream.first_token_seconds, stream.between_tokens_seconds) if stream else (_NAN, _NAN)
    )
    outcome = classify(response.code, ClientTimings(latency, first_token, between), run.facts.slo)
    floor = parse_number(payload.parameters.get(ACCURACY_FLOOR))
    record = Record(due, sent, latency, outcome, response.code, detail=response.detail, images=run.images[number])
    record = record._replace(
        floor=_NAN if floor is None else floor, first_token_seconds=first_token, between_tokens_seconds=between
    )
    if response.message is None:
        return record._replace(
            drop_stage=response.headers.get(STAGE_HEADER, ""), drop_reason=response.headers.get(REASON_HEADER, "")
        )
    outputs = {tensor.name: tensor.array for tensor in response.message.outputs}
    try:
        score = run.source.score(payload.truth, outputs)
    except Exception as error:  # noqa: BLE001 - a user's scoring error fails this request alone
        detail = f"the response cannot be scored: {error!r}"
        return record._replace(outcome=RequestOutcome.FAILED, code="InvalidResponse", detail=detail)
    parameters = response.message.parameters
    expected = parse_number(parameters.get(EXPECTED_ACCURACY))
    pending = _escalation_pending(run.facts.stages, parameters)
    record = record._replace(
        correct=score.correct,
        total=score.total,
        expected_accuracy=_NAN if expected is None else expected,
        escalation_pending=int(pending.sum()),
        visits={stage: _visit(stage, parameters) for stage in run.facts.stages},
    )
    if score.row_correct is None or score.row_correct.size != pending.size:
        return record
    return record._replace(escalation_pending_correct=int((score.row_correct & pending).sum()))


def _escalation_pending(stages: Sequence[str], parameters: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Rows with a pending escalation, [rows], of the first stage that reports them; empty if no stage does."""
    flags = next(
        (str(parameters[name]) for s in stages if (name := parameters_of(s).escalation_pending) in parameters), ""
    )
    return np.array([flag == "true" for flag in flags.split(",")]) if flags else np.zeros(0, dtype=np.bool_)


def _visit(stage: str, parameters: Mapping[str, Any]) -> StageVisit:
    """Read a stage's response parameters; a missing or invalid one stays unknown."""

    def number(name: str, unknown: float) -> float:
        value = parse_number(parameters.get(name))
        return value if value is not None and 0 <= value <= _MAX_VISIT_VALUE else unknown

    named = parameters_of(stage)
    return StageVisit(
        variant=str(parameters.get(named.variant, "")),
        batch_size=int(number(named.batch_size, 0)),
        queue_seconds=number(named.queue_seconds, float("nan")),
        service_seconds=number(named.service_seconds, float("nan")),
        operating_point=str(parameters.get(named.operating_point, "")),
    )


async def _report_progress(run: _Run, on_progress: OnProgress) -> None:
    while True:
        on_progress(_progress(run))
        await asyncio.sleep(run.options.progress_seconds)


def _progress(run: _Run) -> Progress:
    facts, outcomes = run.facts, dict(run.outcomes)
    done = (run.elapsed_seconds, facts.duration_seconds, len(run.arrivals), run.sent)
    return Progress(*done, outcomes, run.correct, run.total)
