"""Refused and absurd requests among normal ones: what the router measures, and the adapter plans with, stays.

A real `Router` with a fake clock and replicas that only take time serves 20 requests a second for two minutes, with and
without ten kinds of absurd requests, three of each.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest

from tests.adapter.test_sameness import CountingLoop, TurningClock
from tests.builders import a_pipeline, a_plan, a_stage
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.fakes import a_call
from trimtab_adapter.controller import Controller
from trimtab_adapter.observation import read_state
from trimtab_pipelines.spec import InferencePipeline
from trimtab_predictor.forecaster import ReactiveForecaster
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.internal_wire import LastChunk, Usage
from trimtab_protocol.errors import ProtocolError
from trimtab_router.refusal import Refusal
from trimtab_router.router import Router
from trimtab_router.scheduling.prompt_lengths import PromptFeatures
from trimtab_router.scheduling.replica_slots import Cancelled, Completed, Rejected, ReplicaSlots
from trimtab_router.scheduling.roles import GenerationScheduler

RATE_RPS, SECONDS, ABSURD_FROM, TICK_SECONDS = 20, 120, 95, 5
EPOCH_SECONDS = 1_600_000_000.0
READY = frozenset({"small"})
TOO_LONG, HUGE, SURE = b"over the limit", b"huge image", 0.9


@dataclass
class Replicas:
    """Transport to replicas that take the seconds a request asks for; a chat has a token for each four bytes."""

    clock: TurningClock
    canceled: set[Any] = field(default_factory=set)

    def send(self, batch: Any, on_end: Callable[..., None]) -> None:
        values = np.concatenate([rows.array("x")[:, 0] for rows in batch.row_slices])
        seconds = (0.01 + 0.001 * batch.rows) * jitter(batch) * max(1.0, float(values.max()))
        outputs = [
            {"y": rows.array("x"), "sure": np.full(rows.rows, SURE if rows.request.rows <= 2 else 0.1, np.float32)}
            for rows in batch.row_slices
        ]
        self._end(seconds, partial(on_end, batch, Completed(outputs, batch.point.name)))

    def stream(self, batch: Any, on_chunk: Callable[..., None], on_end: Callable[..., None]) -> None:
        row = batch.row_slices[0]
        text = bytes(row.array("messages")[0])
        if TOO_LONG in text:
            self._end(0.001, partial(on_end, batch, Rejected("the prompt has 25000 tokens; a slot holds 1024")))
            return
        tokens = len(text) if len(text) > 1000 else len(text) // 4
        last = LastChunk("a", "stop", Usage(tokens, 2, text=tokens))
        outputs = {name: row.array("messages") for name in ("text", "finish_reason")} | {"usage": np.zeros((1, 5))}
        first = 0.02 * jitter(batch) * (40 if HUGE in text else 1) + 0.0002 * tokens
        self._end(first, partial(on_chunk, batch, last))
        self._end(first * 10, lambda: on_end(batch, self._outcome(batch, outputs)))

    def cancel(self, batch: Any) -> None:
        self.canceled.add(batch)

    def _outcome(self, batch: Any, outputs: Any) -> Cancelled | Completed:
        return Cancelled() if batch in self.canceled else Completed((outputs,), batch.point.name)

    def _end(self, seconds: float, act: Callable[[], None]) -> None:
        self.clock.call_at(self.clock.now + seconds, act)


def jitter(batch: Any) -> float:
    """0.95 to 1.05, by the arrival of the first row."""
    return 1.0 + 0.05 * float(np.sin(1e3 * batch.row_slices[0].request.enqueued_at))


def rows(count: int, value: float = 0.0, **parameters: Any) -> InferRequest:
    return InferRequest("sample", (Tensor.of("x", np.full((count, 4), value, np.float32)),), parameters=parameters)


def chat(text: bytes, count: int = 1, **parameters: Any) -> InferRequest:
    messages = Tensor.of("messages", np.array([text] * count, object))
    return InferRequest("sample", (messages,), parameters=parameters)


def bad(name: str, array: Any) -> InferRequest:
    return InferRequest("sample", (Tensor.of(name, array),))


HANGS_UP = "hangs up"
ABSURD = {
    "rows": [
        rows(500),
        rows(10_000),
        rows(0),
        rows(1, value=100.0),
        rows(1, timeout=1),
        replace(rows(1), parameters={"trimtab.task": "unheard-of"}),
        replace(rows(1), parameters={"trimtab.accuracy_floor": 2.0}),
        replace(rows(1), id=HANGS_UP),
        bad("x", np.zeros((1, 3), np.float32)),
        bad("z", np.zeros((1, 4), np.float64)),
    ],
    "chats": [
        chat(TOO_LONG + b"a" * 25_000),
        chat(b"dense" * 220),
        chat(b"dense" * 220 + HUGE),
        chat(b"a" * 60, count=40),
        chat(b"", count=0),
        chat(HUGE + b"a" * 40),
        chat(b"a" * 60, timeout=1),
        replace(chat(b"a" * 60), parameters={"trimtab.task": "unheard-of"}),
        bad("messages", np.zeros((1, 4), np.float32)),
        bad("images", np.array([[b"a" * 60]], object)),
    ],
}


def a_pipeline_of(kind: str) -> InferencePipeline:
    slo = {"latency": "10s"}
    if kind == "chats":
        return a_chat_pipeline([a_writer()], slo=slo)
    outputs = [{"name": "y", "datatype": "FP32", "shape": [4]}, {"name": "sure", "datatype": "FP32"}]
    stage = a_stage("sort", "request.inputs.x", outputs=outputs, confidence="sure")
    evidence = {"source": "Measured", "meanConfidence": SURE, "samples": 1000}
    stage["variants"] = [variant | {"accuracyEvidence": evidence} for variant in stage["variants"]]
    return a_pipeline([stage], slo=slo)


def a_normal_request(kind: str, rng: np.random.Generator) -> InferRequest:
    if kind == "chats":
        return chat(b"a" * int(rng.integers(40, 90)))
    return rows(int(rng.choice([1, 1, 1, 2])))


async def measured(kind: str, absurd: list[InferRequest]) -> list[dict[str, float]]:
    """Every estimate at each tick of the control loop."""
    clock, rng = TurningClock(), np.random.default_rng(3)
    pipeline = a_pipeline_of(kind)
    name = pipeline.spec.stages[0].name
    seconds = {1: 0.022, 8: 0.022} if kind == "chats" else {1: 0.011, 8: 0.018}
    plan = a_plan(pipeline, replicas=2, serviceSeconds=seconds)
    transport = cast("Any", Replicas(clock))
    controller, ticks = Controller(ReactiveForecaster()), []
    with patch("time.time", lambda: EPOCH_SECONDS + clock.now):
        router = Router(pipeline, plan, clock=clock, transports={name: transport})
        scheduler = router.schedulers[name]
        replicas = [ReplicaSlots(f"replica-{n}") for n in range(2)]
        for replica in replicas:
            replica.set_ready_variants(READY)
        scheduler.set_replicas(replicas)
        scheduler.refresh_replicas()
        running: set[asyncio.Task[None]] = set()

        async def infer(request: InferRequest) -> None:
            with suppress(Refusal, ProtocolError):
                await router.infer(a_call(pipeline, request, clock.now))

        def send(request: InferRequest) -> None:
            task = asyncio.ensure_future(infer(request))
            running.add(task)
            task.add_done_callback(running.discard)
            if request.id == HANGS_UP:
                clock.call_at(clock.now + 0.005, task.cancel)

        for number in range(RATE_RPS * SECONDS):
            clock.call_at(number / RATE_RPS + 0.001, partial(send, a_normal_request(kind, rng)))
        for number, request in enumerate(absurd):
            clock.call_at(ABSURD_FROM + number / 4, partial(send, request))
        for tick in range(TICK_SECONDS, SECONDS, TICK_SECONDS):
            await clock.run(tick)
            state = router.state()
            controller.update(read_state(state.model_dump(mode="json")))
            inputs = controller.planning_inputs(cast("Any", None), None, clock.now, 60.0)
            estimates = {f"rows of {stage}": amount for stage, amount in inputs.rows_per_request.items()}
            estimates |= {f"tokens of {stage}": amount for stage, amount in inputs.prompt_tokens.items()}
            estimates |= {f"reported {stage}": found.service_ratio or 0.0 for stage, found in state.stages.items()}
            estimates |= {f"ratio of {stage}": ratio for (stage, _), ratio in inputs.service_ratios.items()}
            estimates["slowdown"] = inputs.slowdown
            estimates |= {"drifted": 1.0 + len(inputs.accuracies), "seconds of a batch": scheduler.capacity().seconds}
            estimates |= {"arrivals": float(sum(router.arrival_history(SECONDS).rps))}
            if isinstance(scheduler, GenerationScheduler):
                estimates["prompt of 60 bytes"] = scheduler.prompt_lengths.tokens(PromptFeatures(60))
            ticks.append(estimates)
        for task in running:
            task.cancel()
    return ticks


@pytest.mark.parametrize("kind", ["rows", "chats"])
def test_absurd_requests_move_no_estimate(kind):
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        calm = runner.run(measured(kind, []))
        beside = runner.run(measured(kind, ABSURD[kind] * 3))

    moved = {
        (TICK_SECONDS * (tick + 1), name): (before[name], after.get(name))
        for tick, (before, after) in enumerate(zip(calm, beside, strict=True))
        for name in before
        if after.get(name) != pytest.approx(before[name], rel=0.02)
    }
    assert moved == {}
