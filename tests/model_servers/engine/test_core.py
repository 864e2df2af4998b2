"""Engine core and async engine: an error affects one request, and every ended request releases its resources."""

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.model_servers.engine.models import LlavaRequests, complete, llava
from trimtab_model_servers.engine.async_engine import AsyncEngine
from trimtab_model_servers.engine.core import EngineCore, EngineEvent, EventListener, Gauges
from trimtab_model_servers.engine.model_adapters import ModelAdapter, adapt_model
from trimtab_model_servers.engine.request import (
    EngineBusy,
    FinishReason,
    Image,
    Request,
    RequestDone,
    RequestError,
    Sampling,
    TokenChunk,
    Usage,
)
from trimtab_model_servers.engine.scheduler import EngineLimits, Scheduler

LIMITS = EngineLimits(slots=4, slot_tokens=200, step_tokens=40)
POISONED = 5


class Fragile(ModelAdapter):
    """A model that fails on the token `POISONED`, and whose logits are NaN on the next one."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if len(tokens) and bool((tokens == POISONED).any()):
            raise RuntimeError("poison")
        embedded = super().embed(tokens)
        embedded[tokens == POISONED + 1] = torch.nan
        return embedded


@pytest.fixture(scope="module")
def fragile() -> Fragile:
    return Fragile(llava())


@pytest.fixture(scope="module")
def served() -> Any:
    return adapt_model(llava())


def ran(core: EngineCore, *requests: Request) -> dict[str, list[EngineEvent]]:
    heard: dict[str, list[EngineEvent]] = {request.id: [] for request in requests}
    for request in requests:
        core.submit(request, [], heard[request.id].append)
    complete(core)
    return heard


def last(events: list[EngineEvent]) -> RequestDone:
    assert isinstance(events[-1], RequestDone)
    return events[-1]


def text(events: list[EngineEvent]) -> str:
    return "".join(event.text for event in events)


def tokens(events: list[EngineEvent]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenChunk)]


def idle(gauges: Gauges) -> bool:
    in_flight = (gauges.waiting, gauges.running, gauges.busy_slots, gauges.pending_tokens)
    return not any((*in_flight, gauges.stored_requests, gauges.embedding_bytes))


@pytest.mark.parametrize(("word", "why"), [(POISONED, "RuntimeError: poison"), (POISONED + 1, "not finite")])
def test_failing_request_ends_without_affecting_others(fragile, word, why):
    innocent = [Request(f"r{number}", (1, 20 + number, 30), max_new_tokens=6) for number in range(3)]
    alone = {name: tokens(events) for name, events in ran(EngineCore(fragile, LIMITS), *innocent).items()}
    core = EngineCore(fragile, LIMITS)

    heard = ran(core, *innocent[:2], Request("guilty", (1, word, 30), max_new_tokens=6), innocent[2])

    guilty = heard.pop("guilty")
    assert [event.finish_reason for event in guilty if isinstance(event, RequestDone)] == [FinishReason.ERROR]
    assert why in (last(guilty).error or "")
    assert {name: tokens(events) for name, events in heard.items()} == alone
    assert idle(core.gauges)
    again = ran(core, *(Request(f"s{each.id}", each.tokens, max_new_tokens=6) for each in innocent))
    assert {name[1:]: tokens(events) for name, events in again.items()} == alone


def test_invalid_embeddings_are_rejected_at_submission(served):
    core, request = EngineCore(served, LIMITS), Request("r", (1, 3, 3, 2), images=(Image("cat", 1, 2, 2),))

    with pytest.raises(RequestError, match=r"embeddings are \[2, 7\]; should be \[2, 48\]"):
        core.submit(request, [torch.zeros(2, 7)], lambda _: None)
    with pytest.raises(RequestError, match="not finite"):
        core.submit(request, [torch.full((2, 48), torch.inf)], lambda _: None)

    assert idle(core.gauges)


def test_invalid_late_embeddings_end_their_request(served):
    core = EngineCore(served, LIMITS)
    heard: list[EngineEvent] = []
    core.submit(Request("r", (1, 3, 3, 2), images=(Image("cat", 1, 2, 2),)), [None], heard.append)
    core.step()

    core.add_embeddings("r", {0: torch.zeros(3, 48)})

    assert len(heard) == 1
    assert last(heard).finish_reason is FinishReason.ERROR
    assert idle(core.gauges)


def test_image_in_reused_prefix_needs_no_embeddings(served):
    core, shown = EngineCore(served, LIMITS), torch.randn(2, 48, generator=torch.Generator().manual_seed(1))
    first = Request("first", (1, 3, 3, 20, 30), images=(Image("cat", 1, 2, 2),), max_new_tokens=6)
    heard: dict[str, list[EngineEvent]] = {"first": [], "again": []}
    for request, images in ((first, [shown]), (replace(first, id="again"), [None])):
        core.submit(request, images, heard[request.id].append)
        complete(core)

    assert last(heard["again"]).usage.cached == 4
    assert tokens(heard["again"]) == tokens(heard["first"])
    assert idle(core.gauges)


def test_request_with_raising_listener_is_cancelled_alone(served):
    core = EngineCore(served, LIMITS)
    heard: list[EngineEvent] = []

    def gone(event: EngineEvent) -> None:
        raise ConnectionError("gone")

    core.submit(Request("gone", (1, 2, 3)), [], gone)
    core.submit(Request("there", (1, 2, 3), max_new_tokens=4), [], heard.append)
    complete(core)

    assert len(tokens(heard)) == 4
    assert idle(core.gauges)


def test_first_tokens_are_emitted_before_later_ones(served):
    core, emitted = EngineCore(served, LIMITS), []
    heard = lambda event: emitted.append(event.request_id)  # noqa: E731
    core.submit(Request("old", (7, 8), max_new_tokens=4), [], heard)
    core.step()
    core.submit(Request("new", (9, 10), max_new_tokens=4), [], heard)
    while emitted == ["old"]:
        core.step()

    assert emitted[1:3] == ["new", "old"]


def test_stop_string_across_tokens_ends_the_output_before_it(served):
    def letters() -> Any:
        return lambda token: f"<{token}>"

    core = EngineCore(served, LIMITS, new_detokenizer=letters)
    whole = text(ran(core, Request("whole", (1, 20), max_new_tokens=12))["whole"])
    stop = whole[10:17]

    heard = ran(core, Request("cut", (1, 20), max_new_tokens=12, stop_strings=(stop, "never")))["cut"]

    assert text(heard) == whole[: whole.find(stop)]
    assert last(heard).finish_reason is FinishReason.STOP


def test_end_token_ends_output_after_minimum_length(served):
    core = EngineCore(served, LIMITS)
    free = tokens(ran(core, Request("free", (1, 20), max_new_tokens=8))["free"])
    end = frozenset({free[2]})

    short = ran(core, Request("short", (1, 20), max_new_tokens=8, end_ids=end))["short"]
    long = ran(core, Request("long", (1, 20), max_new_tokens=8, min_new_tokens=5, end_ids=end))["long"]

    assert tokens(short) == free[: free.index(free[2]) + 1]
    assert last(short).finish_reason is FinishReason.STOP
    assert not end & set(tokens(long)[:5])


def test_seed_repeats_output_and_narrow_sampling_is_greedy(served):
    core = EngineCore(served, LIMITS)

    def drawn(name: str, sampling: Sampling) -> list[int]:
        return tokens(ran(core, Request(name, (1, 20), max_new_tokens=20, sampling=sampling))[name])

    warm = Sampling(temperature=1.5, seed=3)
    assert drawn("a", warm) == drawn("b", warm)
    assert drawn("c", Sampling(temperature=1.5, seed=4)) != drawn("d", warm)
    greedy = drawn("e", Sampling())
    assert drawn("f", Sampling(temperature=1.5, top_k=1)) == greedy
    assert drawn("g", Sampling(temperature=1.5, top_p=1e-6)) == greedy


@pytest.mark.parametrize("sampling", [Sampling(1e-40), Sampling(5e-324), Sampling(1.0, top_p=1e-60)])
def test_sampling_parameters_that_underflow_are_greedy(served, sampling):
    plain = Request("plain", (1, 20), max_new_tokens=8)
    narrow = replace(plain, id="narrow", sampling=sampling)
    alone = tokens(ran(EngineCore(served, LIMITS), plain)["plain"])
    core = EngineCore(served, LIMITS)

    heard = ran(core, plain, narrow)

    assert {last(events).finish_reason for events in heard.values()} == {FinishReason.LENGTH}
    assert tokens(heard["plain"]) == tokens(heard["narrow"]) == alone
    assert idle(core.gauges)


def test_request_that_cannot_be_detokenized_ends_alone(served):
    spelt: list[int] = []

    def letters() -> Any:
        number = len(spelt)
        spelt.append(number)

        def spell(token: int) -> str:
            if number == 1:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "no such token")
            return f"<{token}>"

        return spell

    core = EngineCore(served, LIMITS, new_detokenizer=letters)
    alone = tokens(ran(EngineCore(served, LIMITS), Request("first", (1, 20), max_new_tokens=6))["first"])

    heard = ran(core, *(Request(name, (1, 20), max_new_tokens=6) for name in ("first", "second", "third")))

    reasons = [last(events).finish_reason for events in heard.values()]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert "no such token" in (last(heard["second"]).error or "")
    assert tokens(heard["first"]) == tokens(heard["third"]) == alone
    assert idle(core.gauges)


def test_fail_all_ends_every_request_despite_errors(served, monkeypatch):
    core, heard = EngineCore(served, LIMITS), dict[str, list[EngineEvent]]()
    for name in ("first", "second"):
        heard[name] = []
        core.submit(Request(name, (1, 20), max_new_tokens=6), [], heard[name].append)
    usage = Scheduler.usage

    def lost(scheduler: Scheduler, request_id: str) -> tuple[int, int]:
        if request_id == "first":
            raise KeyError(request_id)
        return usage(scheduler, request_id)

    monkeypatch.setattr(Scheduler, "usage", lost)
    core.fail_all("it broke")

    ends = [(last(events).finish_reason, last(events).error) for events in heard.values()]
    assert ends == [(FinishReason.ERROR, "it broke")] * 2


async def test_closed_stream_cancels_its_request(served):
    alone = llava()
    drawn = LlavaRequests(alone, seed=21)
    asked = [drawn.draw(f"r{number}") for number in range(8)]
    engine = AsyncEngine(EngineCore(served, LIMITS))

    async def heard(index: int) -> list[EngineEvent]:
        return [event async for event in engine.stream(asked[index].request, asked[index].images)]

    async def left() -> None:
        stream = engine.stream(Request("left", (1, 2, 3), max_new_tokens=190), [])
        await anext(stream)
        await stream.aclose()

    try:
        leaving = asyncio.create_task(left())
        answers = await asyncio.gather(*(heard(index) for index in range(len(asked))))
        await leaving
        after = [event async for event in engine.stream(Request("last", (1, 2)), [])]
    finally:
        await asyncio.to_thread(engine.stop)

    assert [tokens(events) for events in answers] == [each.oracle(alone) for each in asked]
    assert last(after).finish_reason is FinishReason.LENGTH
    assert idle(engine.gauges)
    with pytest.raises(Exception, match="the engine stops"):
        engine.submit(Request("late", (1, 2)), [], lambda _: None)


class Scripted:
    """A core without a model: each step emits scripted events."""

    def __init__(self, *steps: list[EngineEvent]) -> None:
        self.gauges = Gauges()
        self.listeners: dict[str, EventListener] = {}
        self._steps = deque(steps)

    def submit(self, request: Request, _: Any, on_event: EventListener) -> None:
        self.listeners[request.id] = on_event

    def step(self) -> bool:
        """Emit the next events once all of their requests are submitted."""
        if not self._steps or any(event.request_id not in self.listeners for event in self._steps[0]):
            return False
        for event in self._steps.popleft():
            self.listeners[event.request_id](event)
        return True


async def test_first_tokens_arrive_before_those_of_the_same_step():
    def said(name: str) -> TokenChunk:
        return TokenChunk(name, 1, 0.0, "word")

    def ended(name: str) -> RequestDone:
        return RequestDone(name, FinishReason.LENGTH, Usage(2, 1, 0, 0))

    heard = list[tuple[str, bool]]()
    script: list[list[EngineEvent]] = [
        [said("goes on")],
        [said("goes on"), said("begins")],
        [ended("goes on"), said("short"), ended("short")],
        [ended("begins")],
    ]
    engine = AsyncEngine(cast("EngineCore", Scripted(*script)))

    async def listened(name: str) -> None:
        async for event in engine.stream(Request(name, (1, 2)), []):
            heard.append((name, isinstance(event, RequestDone)))

    try:
        await asyncio.gather(*(listened(name) for name in ("goes on", "begins", "short")))
    finally:
        await asyncio.to_thread(engine.stop)

    assert len(heard) == 7
    assert heard.index(("begins", False)) < heard.index(("goes on", False), 1)
    assert heard.index(("short", False)) < heard.index(("goes on", True))


async def test_duplicate_request_id_is_rejected(served):
    engine = AsyncEngine(EngineCore(served, LIMITS))
    try:
        first = engine.stream(Request("same", (1, 2, 3), max_new_tokens=150), [])
        begun = await anext(first)
        with pytest.raises(RequestError, match="'same' is in flight"):
            await anext(engine.stream(Request("same", (1, 2, 3)), []))
        rest = [event async for event in first]
    finally:
        await asyncio.to_thread(engine.stop)

    assert isinstance(begun, TokenChunk)
    assert last(rest).finish_reason is FinishReason.LENGTH
    assert len(tokens(rest)) == 149


class Panic(BaseException):
    """As PyO3's PanicException, which tokenizers raises."""


@pytest.mark.parametrize("fault", [ZeroDivisionError, Panic])
async def test_failed_engine_ends_all_requests_and_rejects_new_ones(served, monkeypatch, fault):
    core = EngineCore(served, LIMITS)

    def broken() -> bool:
        raise fault("a fault of the engine's own")

    engine = AsyncEngine(core)
    monkeypatch.setattr(core, "step", broken)
    events = [event async for event in engine.stream(Request("r", (1, 2)), [])]

    await asyncio.to_thread(engine.stop)
    assert last(events).finish_reason is FinishReason.ERROR
    assert f"{fault.__name__}: a fault of the engine's own" in (last(events).error or "")
    assert engine.failure.result(0) == last(events).error
    with pytest.raises(EngineBusy):
        await anext(engine.stream(Request("late", (1, 2)), []))
