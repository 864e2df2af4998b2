"""Benchmarks without measurements: no threshold holds."""

import asyncio

import pytest

from benchmarks.layouts.asking import ChatResult
from benchmarks.layouts.phases import cut_streams, settled


def test_no_stream_cut_after_a_token_gives_no_time_to_error():
    whole, cut = ChatResult(whole=True, pieces=9), ChatResult(pieces=2, error="the replica is gone", ended_at=10.5)

    assert cut_streams([whole, ChatResult(error="too many", status=503)], 10.0)["writer_killed_cut_with_words"] == 0
    found = cut_streams([whole, cut], 10.0)
    assert (found["writer_killed_cut_with_words"], found["writer_killed_slowest_reason_seconds"]) == (1, 0.5)


def test_no_sustained_fixed_placement_skips_the_planned_one():
    class Asker:
        model = "lmm-digits"

        async def at_rate(self, *asked):
            pytest.fail(f"asked {asked}")

    share, note = asyncio.run(settled(None, Asker(), 1, 0.0))  # type: ignore[arg-type]

    assert share == 0.0
    assert "no fixed layout" in note
