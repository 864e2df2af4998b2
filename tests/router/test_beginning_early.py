"""Chats that begin on the images that are there while others are still encoded, and references to their images."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import astuple
from hashlib import sha256
from typing import Any, cast

import numpy as np
import pytest

from tests.router.chats import a_png
from tests.router.disaggregated import (
    PULLS,
    ROWS,
    WHOLE,
    Beginner,
    Encoder,
    a_choosing_pipeline,
    a_disaggregated_pipeline,
    a_picture,
    ask,
    reading,
    references,
    reported_references,
    shown_by,
)
from tests.router.fakes import until
from tests.router.test_generation import Writers
from tests.router.test_queue import Caller
from trimtab_protocol.chat.embedding_refs import EmbeddingRef, EncodedImage
from trimtab_protocol.chat.internal_wire import content_id, encoder_of_content
from trimtab_router.execution import chat_images
from trimtab_router.execution.chat_images import ImageSizeCache, PartialImages, arrived_images_body
from trimtab_router.scheduling.policies.interface import Point
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest
from trimtab_router.transport.http_transport import HttpTransport

AWAITED = "pending:"


@asynccontextmanager
async def stepping(encoders, writers, **rig):
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
        arrived = [(one["image"], one["digest"]) for one in writer.arrived_images]
        assert arrived == [(number, shown_by(pictures[number])) for number in (1, 2, 3)]
        assert {one["url"].rpartition("/")[2] for one in [found[0], *writer.arrived_images]} <= encoder.kept
        assert (len(encoder.shown), len(writer.written)) == (4, 1)
        assert await rig.outcomes() == {"ok": 2}
        assert rig.value("trimtab_early_prefills_total", stage="text") == 1
        assert nothing_is_left(rig, [encoder], [writer])


@pytest.mark.parametrize("why", ["the model does not support it", "an image has an unknown size", "several choices"])
async def test_prefill_waits_for_all_images_without_early_support(why):
    encoder, writer = Encoder(), Beginner(name="writer")
    if why == "the model does not support it":
        writer.facts = lambda: {"partial_prefill": False}
    other = a_png(90, 90) if why == "an image has an unknown size" else a_picture(2)
    choices = {"n": 2} if why == "several choices" else {}
    async with stepping([encoder], [writer]) as (rig, turns):
        turns.set()
        assert (await ask(rig, a_picture(1), other, a_picture(3), **choices))[0] == 200
        assert all(AWAITED not in [one["url"] for one in references(writer, n)] for n in range(len(writer.written)))


def a_partial_chat(top):
    early = StageRequest(cast("Any", Caller()), "text", 1, {}, deadline=50.0, now=0.0)
    top.scheduler.start_early_prefill(early)
    top.settle()
    return early


def test_partial_chat_starts_last_and_uses_no_capacity():
    top = Writers(a_disaggregated_pipeline(), places=1)
    top.slots[0].partial_prefill = frozenset({PULLS})
    complete = [top.take(), top.take()]
    early = a_partial_chat(top)
    for request in complete:
        assert [batch.row_slices[0].request for batch in top.sent] == [request]
        top.end(top.sent[0])
        top.settle()

    assert [batch.row_slices[0].request for batch in top.sent] == [early]
    late = top.take()  # though there is one place
    assert [batch.row_slices[0].request for batch in top.sent] == [early, late]
    assert top.scheduler.complete_images(early, {})


def test_partial_chat_not_started_is_queued_once_complete():
    top = Writers(a_disaggregated_pipeline(), places=1)
    top.slots[0].partial_prefill = frozenset({PULLS})
    top.take()
    early = a_partial_chat(top)

    assert not top.scheduler.complete_images(early, {})
    assert top.scheduler.snapshot().waiting_partial_chats == 0


@pytest.mark.parametrize(("early", "seconds"), [(False, 30.0), (True, 37.5)])
async def test_partial_chat_has_the_request_timeout(early, seconds):
    stage = a_disaggregated_pipeline().spec.stage("text")
    inputs = {name: np.array([b"[]"], dtype=object) for name in ("messages", "references")}
    work = StageRequest(cast("Any", Caller()), "text", 1, inputs, deadline=11.5, now=0.0)
    point = Point("default", 1.0, lambda _: 0.001)
    pieces = [RowSlice(work, 0, 1)]
    batch = Batch(ReplicaSlots("one"), "small", point, pieces, 1, 4.0, found_idle=False, early_prefill=early)
    datatypes = dict.fromkeys(inputs, "BYTES")
    transport = HttpTransport(stage, datatypes=datatypes, hang_seconds=30.0, max_response_bytes=2**20)

    assert transport.build_request(batch).timeout_seconds == seconds


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


@pytest.mark.parametrize("cause", ["an invalid image", "a disconnect"])
async def test_ended_request_ends_its_early_prefill(cause):
    encoder, writer = Encoder(), Beginner(name="writer")
    async with stepping([encoder], [writer]) as (rig, turns):
        encoder.kept.clear()
        asked = asyncio.create_task(ask(rig, a_picture(1), a_picture(2)))
        turns.let()
        await until(lambda: writer.running == 1)
        if cause == "a disconnect":
            asked.cancel()
            await until(lambda: writer.written[-1].ended == "left")
        else:
            encoder.faults.append((422, "image 1 is none"))
        turns.set()
        if cause == "an invalid image":
            status, answer = await asked
            assert (status, "image 1 is none" in answer["error"]["message"]) == (400, True)

        await until(lambda: writer.written[-1].ended == "left")
        await until(lambda: nothing_is_left(rig, [encoder], [writer]) and not encoder.kept)


def test_partial_chat_leaves_no_row_when_stage_turns_colocated():
    top = Writers(a_choosing_pipeline(), slots=2, places=1)
    pulls, whole = top.slots
    pulls.partial_prefill = frozenset({PULLS})
    whole.set_ready_variants(frozenset({WHOLE}))
    top.take()
    assert (pulls.inflight, whole.inflight) == (1, 0)
    early = a_partial_chat(top)
    top.scheduler.apply_plan(top.scheduler.plan.replace(variant=WHOLE))
    top.end(top.sent[0])
    for _ in range(3):
        top.scheduler.refresh_replicas()
        top.settle()

    assert top.scheduler.variant == WHOLE
    assert (pulls.has_spare_capacity, early.queued_rows) == (True, 0)
    top.scheduler.cancel(early)
    assert top.scheduler.queue.rows == 0


URL = "http://encoder:9000/v2/models/encode/embeddings/a-0"


def came(*files):
    reported = reported_references(np.array([[file] for file in files], dtype=object))
    return chat_images.addressed_references(reported, [URL] * len(files))


def known():
    sizes = ImageSizeCache()
    PartialImages([a_picture(9)], sizes).add(0, came(a_picture(9)))
    return sizes


def test_images_of_a_known_size_are_announced():
    files = [a_picture(number) for number in range(3)]
    images = PartialImages(files, known())
    assert not images.has_first
    images.add(0, came(files[0]))
    assert images.has_first

    (references,) = images.references()
    first, *others = json.loads(references)
    assert first["digest"] == shown_by(files[0])
    assert others == [{"url": "pending:", "rows": ROWS, "digest": shown_by(file)} for file in files[1:]]
    new = images.add(0, came(*files[:2]))
    assert list(new) == [1]
    second = {"url": URL, "rows": ROWS, "digest": shown_by(files[1])}
    assert json.loads(arrived_images_body(new)) == [{"image": 1} | second]
    assert json.loads(images.references()[0])[1] == second
    assert not images.complete
    images.add(2, came(files[2]))
    assert images.complete


def test_tiled_image_is_announced_with_its_columns():
    files = [a_picture(1), a_picture(2)]
    cut = EmbeddingRef(url=URL, rows=ROWS, columns=3, digest=shown_by(files[0])).json_bytes()
    images = PartialImages(files, ImageSizeCache())
    images.add(0, np.array([cut], dtype=object))

    announced = images.references()
    assert announced is not None
    assert [one["columns"] for one in json.loads(announced[0])] == [3, 3]
    assert json.loads(arrived_images_body({0: cut}))[0]["columns"] == 3


@pytest.mark.parametrize("file", [b"no image", a_picture(1)[:20], b""])
def test_what_has_no_known_size_is_not_announced(file):
    images = PartialImages([a_picture(1), file], known())
    images.add(0, came(a_picture(1)))
    assert images.references() is None
    anonymous = PartialImages([a_picture(1), a_picture(2)], known())
    anonymous.add(0, np.array([b'{"rows": 4}'], dtype=object))
    assert anonymous.references() is None


def test_sizes_that_were_seen_longest_ago_are_forgotten():
    sizes = ImageSizeCache(max_sizes=1)
    sizes.record("one", a_picture(1), EncodedImage(rows=4))
    sizes.record("other", a_picture(1), EncodedImage(rows=5))
    assert (sizes.lookup("one", a_picture(2)), len(sizes)) == (None, 1)
    assert sizes.lookup("other", a_picture(2)) == EncodedImage(rows=5)


def test_image_digest_includes_its_encoder():
    digest = sha256(b"file").hexdigest()
    assert encoder_of_content(content_id("family:path", digest, 4)) == "family:path"
    assert encoder_of_content("") == encoder_of_content("a:b") == ""


def rows_of(chats, tenant="x"):
    return chat_images.image_identities(chat_images.fan_out_images({"images": np.array(chats, dtype=object)}), tenant)


def test_image_identity_covers_file_tenant_and_company():
    same = rows_of([[b"a", b"b"], [b"b", b"a"]])
    assert (same[0], same[1]) == (same[3], same[2])
    assert same[0] != same[1]
    assert rows_of([[b"a", b"b"]], "y")[0] != same[0]
    assert rows_of([[b"a"]])[0] != same[0]
    assert rows_of([[b"a", b"b"]], "") == ()
