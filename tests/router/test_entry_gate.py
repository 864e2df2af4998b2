"""Entry gate: a few requests per turn, in order, and an immediate refusal after a long wait."""

import asyncio
import time

import pytest

from tests.router.fakes import seconds_in
from trimtab_pipelines.request_outcome import ErrorCode, RequestOutcome
from trimtab_router.admission.admission import MAX_WAITING, PER_TURN, EntryGate
from trimtab_router.refusal import Refusal


async def test_a_crowd_enters_in_order_a_few_each_turn_of_the_loop():
    gate = EntryGate(10.0)
    entered: list[int] = []

    async def enter(number: int) -> None:
        await gate.enter(time.monotonic())
        entered.append(number)

    crowd = [asyncio.ensure_future(enter(number)) for number in range(5 * PER_TURN)]
    most, before = 0, 0
    while len(entered) < len(crowd):
        await asyncio.sleep(0)
        most, before = max(most, len(entered) - before), len(entered)

    assert entered == list(range(5 * PER_TURN))
    assert most <= 2 * PER_TURN


async def test_a_lone_request_does_not_wait():
    gate = EntryGate(10.0)
    coroutine = gate.enter(time.monotonic())

    with pytest.raises(StopIteration):
        coroutine.send(None)
    await asyncio.sleep(0)


async def test_request_that_waited_too_long_is_refused():
    gate = EntryGate(0.5)
    long_ago = time.monotonic() - 1.0
    outcomes = await asyncio.gather(*(gate.enter(long_ago) for _ in range(PER_TURN + 1)), return_exceptions=True)

    refusal = outcomes[-1]
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.reason) == (ErrorCode.RESOURCE_EXHAUSTED, "Overload")
    assert refusal.outcome is RequestOutcome.REFUSED
    waited_seconds = seconds_in("the router is overloaded: the request waited #", refusal.message)
    assert 1.0 <= waited_seconds <= time.monotonic() - long_ago + 0.001


async def test_the_crowd_is_bounded():
    gate = EntryGate(10.0)
    crowd = [asyncio.ensure_future(gate.enter(time.monotonic())) for _ in range(PER_TURN + MAX_WAITING + 1)]
    outcomes = await asyncio.gather(*crowd, return_exceptions=True)

    refused = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    why = f"the router is overloaded: {MAX_WAITING} requests wait to be admitted; try again later"
    assert [str(refusal) for refusal in refused] == [why]


async def test_cancelled_requests_take_no_slot():
    gate = EntryGate(10.0)
    at_once, leaving, staying = (
        [asyncio.ensure_future(gate.enter(time.monotonic())) for _ in range(PER_TURN)] for _ in range(3)
    )
    await asyncio.sleep(0)  # all have asked: a first turn's worth is in, two wait
    assert ([call.done() for call in at_once], any(call.done() for call in leaving + staying)) == ([True] * 8, False)
    for call in leaving:
        call.cancel()
    turns = 0
    while not all(call.done() for call in staying):
        await asyncio.sleep(0)
        turns += 1

    assert all(call.cancelled() for call in leaving)
    assert turns <= 2, "those who left were given the turn of those who stayed"
