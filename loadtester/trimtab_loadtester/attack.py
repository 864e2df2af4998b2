"""Open-loop attack: sends requests when they are due and records the outcome of each.

Arrivals and payloads are made before the clock starts. Latency counts from the scheduled arrival; a client that cannot
keep up shows as `client_lateness_seconds_p99` in the summary, not as a lighter load.
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
from trimtab_loadtester.clients import OPEN, Access, Answer, Client, GrpcClient, RestClient
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.multimodal.traffic import draw
from trimtab_loadtester.outcome import ClientTimings, classify
from trimtab_loadtester.payloads.interface import Payload
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_loadtester.payloads.lmm_digits import DrawnChats
from trimtab_loadtester.payloads.sources import PayloadSource, payload_source, require_chats
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
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
CLIENTS: Mapping[ClientProtocol, Callable[[str, str, Access], Client]] = {
    "REST": RestClient,
    "gRPC": GrpcClient,
    "chat": ChatClient,
}
_MOST_TOLD = 2**31 - 1
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run; `correct` of `total` scored answers are correct."""

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
    """How a run is made.

    Attributes:
        protocol: REST sends binary tensors, chat streams OpenAI chats; address is
            host:port of the matching port of the router.
        duration_seconds: None means the load's own length.
        seed: of arrivals and payloads.
        deadline_seconds: sent with each request as `timeout`; None leaves the deadline to the pipeline's SLO.
        give_up_seconds: longest wait for an answer after sending; the request then counts as failed.
        max_outstanding: further requests wait their turn, their latency counting; the summary shows the lateness.
        max_payloads, max_payload_bytes: different payloads kept ready; more requests than these take turns with them.
        cores: what the process may run on; None leaves it alone.
        progress_seconds: interval of progress reports.
        access: credentials and TLS for the proxy.
        samples: the user's own samples with their right answers, where they are; None sends what the pipeline names.
    """

    protocol: ClientProtocol = "REST"
    duration_seconds: float | None = None
    seed: int = 0
    deadline_seconds: float | None = None
    give_up_seconds: float = 60.0
    max_outstanding: int = 4096
    max_payloads: int = 2048
    max_payload_bytes: int = 256 * 2**20
    cores: frozenset[int] | None = None
    progress_seconds: float = 0.5
    access: Access = OPEN
    samples: str | None = None


@dataclass(slots=True)
class _Run:
    """State of a run; `start` is the event loop's time of second 0."""

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
    """Send a load to a pipeline at `address` (host:port) and wait for every answer; blocks until the end.

    Ctrl-C or SIGTERM ends the sending, and `on_signal` is told which; what was sent is still waited for and reported.
    Call it in the main thread of a
    process of its own, so that neither client nor server delays the other's event loop.

    Raises:
        LoadError: the load has no end and no duration was given.
        ValueError: unknown payloads, or too many requests for one run.
    """
    options = options or AttackOptions()
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)

    async def until_signalled() -> Results:
        stop = asyncio.Event()

        def hear(number: signal.Signals) -> None:
            if on_signal is not None:
                on_signal(number)
            stop.set()

        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, hear, number)
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
    """Like `attack`, in a running event loop; sends nothing more once `stop` is set.

    `source` says what is sent where neither the pipeline nor the options do. `arrivals` are the seconds at which
    requests are due, ascending, where they are known; else they are drawn from the load.
    """
    options = options or AttackOptions()
    rates = load.rates(options.duration_seconds)
    duration_seconds = options.duration_seconds or float(rates.size)
    client = CLIENTS[options.protocol](address, pipeline.name, options.access)
    if load.traffic is not None:
        require_chats(pipeline, load.text, options.samples)
        drawn = draw(load.traffic.during(duration_seconds), options.seed)
        requests = [one for one in drawn if one.arrival_seconds < duration_seconds]
        arrivals = np.array([one.arrival_seconds for one in requests])
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
        return await _carry_out(run, on_progress)


def _prepare(
    pipeline: InferencePipeline, source: PayloadSource, client: Client, requests: int, options: AttackOptions
) -> tuple[list[Payload], list[Any], list[int]]:
    """Make and encode the payloads, and count their images: one a request where that fits, else as many as do."""
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


async def _carry_out(run: _Run, on_progress: OnProgress | None) -> Results:
    gc.collect()
    gc.freeze()  # the payloads live to the end: no collection should walk them while requests are timed
    try:
        run.start = asyncio.get_running_loop().time()
        run.facts = replace(run.facts, started_at=time.time())
        telling = asyncio.create_task(_tell(run, on_progress)) if on_progress else None
        await _send_all(run)
        if telling is not None and on_progress is not None:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling
            on_progress(_progress(run))
    finally:
        gc.unfreeze()
    return Results.of(run.facts, run.records)


async def _send_all(run: _Run) -> None:
    """Start each request when it is due. The group ends with the last answer."""
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
            answer = await run.client.send(run.encoded[number], f"{run.options.seed}-{index}")
    except TimeoutError:
        answer = Answer(GAVE_UP, detail=f"no answer within {run.options.give_up_seconds:g} s")
    except Exception as error:  # noqa: BLE001 - whatever happened, this request is accounted for and the others go on
        answer = Answer(type(error).__name__, detail=str(error))
    record = _record(run, number, answer, due, sent)
    run.records.append(record)
    run.outcomes[record.outcome] += 1
    run.correct += record.correct
    run.total += record.total


def _record(run: _Run, number: int, answer: Answer, due: float, sent: float) -> Record:
    payload, latency = run.payloads[number], run.elapsed_seconds - due
    streamed = answer.stream_timings
    began, between = (
        (sent - due + streamed.first_token_seconds, streamed.between_tokens_seconds) if streamed else (_NAN, _NAN)
    )
    outcome = classify(answer.code, ClientTimings(latency, began, between), run.facts.slo)
    floor = parse_number(payload.parameters.get(ACCURACY_FLOOR))
    record = Record(due, sent, latency, outcome, answer.code, detail=answer.detail, images=run.images[number])
    record = record._replace(
        floor=_NAN if floor is None else floor, first_token_seconds=began, between_tokens_seconds=between
    )
    if answer.response is None:
        return record._replace(
            drop_stage=answer.headers.get(STAGE_HEADER, ""), drop_reason=answer.headers.get(REASON_HEADER, "")
        )
    outputs = {tensor.name: tensor.array for tensor in answer.response.outputs}
    try:
        score = run.source.score(payload.truth, outputs)
    except Exception as error:  # noqa: BLE001 - truth and score may be the user's: one answer ends no run
        wrong = f"the answer cannot be scored: {error!r}"
        return record._replace(outcome=RequestOutcome.FAILED, code="WrongAnswer", detail=wrong)
    parameters = answer.response.parameters
    expected = parse_number(parameters.get(EXPECTED_ACCURACY))
    provisional = _provisional(run.facts.stages, parameters)
    told = record._replace(
        correct=score.correct,
        total=score.total,
        expected_accuracy=_NAN if expected is None else expected,
        provisional=int(provisional.sum()),
        visits={stage: _visit(stage, parameters) for stage in run.facts.stages},
    )
    if score.right is None or score.right.size != provisional.size:
        return told
    return told._replace(provisional_correct=int((score.right & provisional).sum()))


def _provisional(stages: Sequence[str], parameters: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which rows of the first stage that says so were answered before their second look; none where none says so."""
    told = next(
        (str(parameters[name]) for s in stages if (name := parameters_of(s).escalation_pending) in parameters), ""
    )
    return np.array([word == "true" for word in told.split(",")]) if told else np.zeros(0, dtype=np.bool_)


def _visit(stage: str, parameters: Mapping[str, Any]) -> StageVisit:
    """Read what the answer says of a stage; what it does not say, or says wrongly, stays unknown."""

    def number(name: str, unknown: float) -> float:
        told = parse_number(parameters.get(name))
        return told if told is not None and 0 <= told <= _MOST_TOLD else unknown

    named = parameters_of(stage)
    return StageVisit(
        variant=str(parameters.get(named.variant, "")),
        batch_size=int(number(named.batch_size, 0)),
        queue_seconds=number(named.queue_seconds, float("nan")),
        service_seconds=number(named.service_seconds, float("nan")),
        operating_point=str(parameters.get(named.operating_point, "")),
    )


async def _tell(run: _Run, on_progress: OnProgress) -> None:
    while True:
        on_progress(_progress(run))
        await asyncio.sleep(run.options.progress_seconds)


def _progress(run: _Run) -> Progress:
    facts, outcomes = run.facts, dict(run.outcomes)
    done = (run.elapsed_seconds, facts.duration_seconds, len(run.arrivals), run.sent)
    return Progress(*done, outcomes, run.correct, run.total)
