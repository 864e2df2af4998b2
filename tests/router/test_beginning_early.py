"""Chats that begin on the images that are there while others are still encoded, through the whole router."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import astuple
from typing import Any, cast

import numpy as np
import pytest

from tests.router.chats import a_png
from tests.router.disaggregated import (
    Beginner,
    Encoder,
    a_disaggregated_pipeline,
    a_picture,
    ask,
    reading,
    references,
    shown_by,
)
from tests.router.fakes import until
from tests.router.layouts import PULLS, WHOLE, a_choosing_pipeline
from tests.router.test_generation import Writers
from tests.router.test_queue import Caller
from trimtab_router.scheduling.policies.interface import Point
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest
from trimtab_router.transport.http_transport import HttpTransport

AWAITED = "pending:"


@asynccontextmanager
async def stepping(encoders, writers, **rig):
    """Encoders that take an image at a time and know how many rows the pictures have; the first is stepped."""
    async with reading(encoders, writers, **{"batchSize": 1} | rig) as made:
        assert (await ask(made, a_picture(250), a_picture(251)))[0] == 200
        for writer in writers:
            writer.written.clear()
        for encoder in encoders:
            encoder.shown.clear()
        yield made, encoders[0].stepped()


def nothing_is_left(rig, encoders, writers):
    snapshots = [astuple(scheduler.snapshot()) for scheduler in rig.router.schedulers.values()]
    return not any(map(any, snapshots)) and not any(replica.running for replica in (*encoders, *writers))


async def test_prefill_starts_on_first_image_and_others_follow():
    encoder, writer, pictures = Encoder(), Beginner(name="writer"), [a_picture(number) for number in range(4)]
    async with stepping([encoder], [writer]) as (rig, turns):
        asked = asyncio.create_task(ask(rig, *pictures))
        turns.let()
        await until(lambda: writer.running == 1)

        found = references(writer)
        assert [one["url"] == AWAITED for one in found] == [False, True, True, True]
        assert [(one["rows"], one["digest"]) for one in found] == [(4, shown_by(each)) for each in pictures]
        turns.let(2)
        await until(lambda: len(writer.arrived_images) == 2)
        turns.let()
        assert (await asked)[0] == 200
        assert [(one["image"], one["digest"]) for one in writer.arrived_images] == [
            (number, shown_by(pictures[number])) for number in (1, 2, 3)
        ]
        assert {one["url"].rpartition("/")[2] for one in [found[0], *writer.arrived_images]} <= encoder.kept
        assert (len(encoder.shown), len(writer.written)) == (4, 1)
        assert await rig.outcomes() == {"ok": 2}
        assert await rig.metric("trimtab_early_prefills_total", stage="text") == 1
        assert nothing_is_left(rig, [encoder], [writer])


@pytest.mark.parametrize("why", ["the model reads nothing ahead", "an image of a size not seen before"])
async def test_prefill_waits_for_all_images_without_early_support(why):
    encoder, writer = Encoder(), Beginner(name="writer")
    if why.startswith("the model"):
        writer.facts = lambda: {"partial_prefill": False}
    other = a_png(90, 90) if why.startswith("an image") else a_picture(2)
    async with stepping([encoder], [writer]) as (rig, turns):
        turns.set()
        assert (await ask(rig, a_picture(1), other, a_picture(3)))[0] == 200
        assert AWAITED not in [one["url"] for one in references(writer)]


async def test_partial_chat_takes_no_capacity_from_complete_ones():
    encoder, writer = Encoder(), Beginner(name="writer")
    async with stepping([encoder], [writer]) as (rig, turns):
        early = asyncio.create_task(ask(rig, a_picture(1), a_picture(2)))
        turns.let()
        await until(lambda: writer.running == 1)

        assert (await ask(rig))[0] == 200  # though there is one place
        assert (writer.most_running, len(writer.arrived_images)) == (2, 0)
        turns.let()
        assert (await early)[0] == 200
        assert nothing_is_left(rig, [encoder], [writer])


@pytest.mark.parametrize(("early", "seconds"), [(False, 30.0), (True, 37.5)])
async def test_partial_chat_has_the_request_timeout(early, seconds):
    stage = a_disaggregated_pipeline().spec.stage("text")
    inputs = {name: np.array([b"[]"], dtype=object) for name in ("messages", "references")}
    work = StageRequest(cast("Any", Caller()), "text", 1, inputs, deadline=11.5, now=0.0)
    point = Point("default", 1.0, lambda _: 0.001)
    batch = Batch(
        ReplicaSlots("one"), "small", point, [RowSlice(work, 0, 1)], 1, 4.0, found_idle=False, early_prefill=early
    )
    datatypes = dict.fromkeys(inputs, "BYTES")
    transport = HttpTransport(stage, datatypes=datatypes, hang_seconds=30.0, max_response_bytes=2**20)

    assert transport.build_request(batch).timeout_seconds == seconds


async def test_complete_chats_start_before_partial_ones():
    encoder, writer = Encoder(), Beginner(name="writer")
    async with stepping([encoder], [writer]) as (rig, turns):
        writer.gate.clear()
        texts = [asyncio.create_task(ask(rig)) for _ in range(2)]
        await until(lambda: rig.router.schedulers["text"].queue.rows == 1)
        early = asyncio.create_task(ask(rig, a_picture(1), a_picture(2)))
        turns.let()
        await until(lambda: rig.router.schedulers["text"].snapshot().waiting_partial_chats)
        assert len(writer.written) == 1
        writer.gate.set()
        assert [(await text)[0] for text in texts] == [200, 200]
        await until(lambda: writer.running == 1)  # now a place idles
        assert references(writer)[1]["url"] == AWAITED
        turns.let()
        assert (await early)[0] == 200


async def test_chat_not_started_early_queues_once_complete():
    encoder, writer = Encoder(), Beginner(name="writer")
    async with stepping([encoder], [writer]) as (rig, turns):
        writer.gate.clear()
        text = asyncio.create_task(ask(rig))
        await until(lambda: writer.running == 1)
        late = asyncio.create_task(ask(rig, a_picture(1), a_picture(2)))
        turns.let(2)
        await until(lambda: rig.router.schedulers["text"].queue.rows == 1)
        writer.gate.set()
        assert [(await each)[0] for each in (text, late)] == [200, 200]
        assert AWAITED not in [one["url"] for one in references(writer)]


async def test_lost_encoder_costs_an_image_and_no_chat():
    encoders, writer = [Encoder(name="dies"), Encoder(name="lives")], Beginner(name="writer")
    async with stepping(encoders, [writer]) as (rig, _):
        held = encoders[1].stepped()
        asked = asyncio.create_task(ask(rig, *map(a_picture, range(3))))
        await until(lambda: all(encoder.running for encoder in encoders))
        held.let()
        await until(lambda: writer.running == 1 or encoders[1].running == 1)
        await encoders[0].kill()
        held.set()

        assert (await asked)[0] == 200
        assert await rig.outcomes() == {"ok": 2}
        assert len(encoders[1].shown) == 3
        await until(lambda: nothing_is_left(rig, encoders[1:], [writer]))


@pytest.mark.parametrize("fault", ["a pull fails", "it rejects images", "it dies"])
async def test_failed_early_prefill_restarts_once_complete(fault):
    encoder, writer = Encoder(), Beginner(name="writer")
    async with stepping([encoder], [writer]) as (rig, turns):
        asked = asyncio.create_task(ask(rig, *map(a_picture, range(3))))
        writer.deaf = fault == "it rejects images"
        if fault == "a pull fails":
            writer.refusing = (502, "image 0: gone")
        turns.let()
        if fault != "a pull fails":
            await until(lambda: writer.running == 1)
        if fault == "it dies":
            writer.cut()
        turns.let(2)
        retries = lambda: rig.value("trimtab_retries_total", stage="text")  # noqa: E731
        await until(lambda: retries() == 1)
        writer.refusing = None
        turns.set()

        assert (await asked)[0] == 200
        assert AWAITED not in [one["url"] for one in references(writer)]
        assert await rig.outcomes() == {"ok": 2}
        await until(lambda: nothing_is_left(rig, [encoder], [writer]))


async def test_invalid_image_ends_an_early_prefill():
    encoder, writer = Encoder(), Beginner(name="writer")
    async with stepping([encoder], [writer]) as (rig, turns):
        asked = asyncio.create_task(ask(rig, a_picture(1), a_picture(2)))
        turns.let()
        await until(lambda: writer.running == 1)
        encoder.faults.append((422, "image 1 is none"))
        turns.let()

        status, answer = await asked
        assert (status, "image 1 is none" in answer["error"]["message"]) == (400, True)
        await until(lambda: writer.written[-1].ended == "left")
        await until(lambda: nothing_is_left(rig, [encoder], [writer]))
        assert len(encoder.shown) == 1


async def test_disconnect_during_encoding_leaves_nothing():
    encoder, writer = Encoder(), Beginner(name="writer")
    async with stepping([encoder], [writer]) as (rig, turns):
        encoder.kept.clear()
        asked = asyncio.create_task(ask(rig, *map(a_picture, range(3))))
        turns.let()
        await until(lambda: writer.running == 1)
        asked.cancel()
        await until(lambda: writer.written[-1].ended == "left")
        turns.set()
        await until(lambda: nothing_is_left(rig, [encoder], [writer]) and not encoder.kept)


async def test_chat_with_several_choices_waits_for_all_images():
    encoder, writer = Encoder(), Beginner(name="writer")
    async with stepping([encoder], [writer]) as (rig, turns):
        turns.set()
        assert (await ask(rig, a_picture(1), a_picture(2), n=2))[0] == 200
        assert all(AWAITED not in [one["url"] for one in references(writer, each)] for each in range(2))


def test_partial_chat_leaves_no_row_when_stage_turns_colocated():
    top = Writers(a_choosing_pipeline(), slots=2, places=1)
    pulls, whole = top.slots
    pulls.partial_prefill = frozenset({PULLS})
    whole.set_ready_variants(frozenset({WHOLE}))
    top.take()
    assert (pulls.inflight, whole.inflight) == (1, 0)
    early = StageRequest(cast("Any", Caller()), "text", 1, {}, deadline=100.0, now=0.0)
    top.scheduler.start_early_prefill(early)
    top.scheduler.apply_plan(top.scheduler.plan.model_copy(update={"variant": WHOLE}))
    top.end(top.sent[0])
    for _ in range(3):
        top.scheduler.refresh_replicas()
        top.settle()

    assert top.scheduler.variant == WHOLE
    assert (pulls.has_spare_capacity, early.queued_rows) == (True, 0)
    top.scheduler.cancel(early)
    assert top.scheduler.queue.rows == 0
