"""Turns of large bodies on the event loop."""

import asyncio
import time

from trimtab_router.admission.parsing_turns import LARGE_BYTES, ParsingTurns


def busy_span() -> tuple[float, float]:
    """Begin and end of a parse that takes five milliseconds."""
    began = time.perf_counter()
    while time.perf_counter() - began < 0.005:
        pass
    return began, time.perf_counter()


async def test_next_large_body_waits_as_long_as_the_last_took() -> None:
    turns = ParsingTurns()

    (_, first_end), (second_begin, _) = await asyncio.gather(*(turns.run(LARGE_BYTES, busy_span) for _ in range(2)))

    assert second_begin - first_end >= 0.004


async def test_small_body_does_not_wait_for_large_ones() -> None:
    turns = ParsingTurns()
    large = [asyncio.ensure_future(turns.run(LARGE_BYTES, busy_span)) for _ in range(3)]

    await turns.run(LARGE_BYTES - 1, busy_span)

    assert not any(task.done() for task in large)
    await asyncio.gather(*large)


async def test_turn_ends_with_an_invalid_body() -> None:
    turns = ParsingTurns()

    first, second = await asyncio.gather(
        turns.run(LARGE_BYTES, lambda: int("x")), turns.run(LARGE_BYTES, busy_span), return_exceptions=True
    )

    assert isinstance(first, ValueError)
    assert isinstance(second, tuple)
