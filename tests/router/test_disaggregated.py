"""Chats whose images are encoded by one pool and pulled by another, or by one replica, as the plan says."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import numpy as np

from tests.router.chats import ChatReplica, a_png
from tests.router.disaggregated import (
    PULLS,
    WHOLE,
    Encoder,
    a_choosing_pipeline,
    ask,
    laid_out,
    reading,
    references,
    shown_by,
)
from tests.router.fakes import a_rig, endpoints_of, until


async def test_each_image_is_a_row_and_references_keep_their_order():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    images = [a_png(8, 8), a_png(40, 30), a_png(90, 90)]
    async with reading([encoder], [writer]) as rig:
        status, answer = await ask(rig, *images)

        assert (status, answer["choices"][0]["message"]["content"]) == (200, "one two")
        found = references(writer)
        assert [one["digest"] for one in found] == [shown_by(image) for image in images]
        assert {one["url"].rpartition("/")[2] for one in found} == encoder.kept
        address = f"http://127.0.0.1:{encoder.port}/v2/models/small/embeddings/"
        assert all(one["url"].startswith(address) for one in found)
        assert Counter(encoder.shown) == Counter((len(image), 3, which) for which, image in enumerate(images))
        assert "images" not in writer.written[0].inputs


async def test_text_only_chat_skips_the_encoders():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    encoder.gate.clear()
    async with reading([encoder], [writer]) as rig:
        held = asyncio.create_task(ask(rig, a_png()))
        await until(lambda: encoder.running > 0)
        assert (await ask(rig))[0] == 200
        assert "references" not in writer.written[0].inputs
        encoder.gate.set()
        assert (await held)[0] == 200


async def test_images_of_a_chat_go_to_free_encoders():
    encoders = [Encoder(name=f"encoder-{number}", delay_seconds=0.05) for number in range(2)]
    writer = ChatReplica(name="writer")
    async with reading(encoders, [writer], batchSize=8) as rig:
        assert (await ask(rig, *[a_png(8, 8 + number) for number in range(5)]))[0] == 200
        assert sorted(len(encoder.shown) for encoder in encoders) == [2, 3]


async def test_dry_run_asks_encoders_and_generation_stage():
    counts = {"prompt_tokens": 14, "text_tokens": 6, "image_tokens": [4, 4]}
    encoder, writer = Encoder(), ChatReplica(name="writer", counts=counts)
    async with reading([encoder], [writer]) as rig:
        status, answer = await ask(rig, a_png(), a_png(9, 9), dry_run=True)

        assert (status, answer["usage"]["prompt_tokens"]) == (200, 14)
        assert writer.counted == [[{"url": "blank:", "rows": 4}] * 2]
        assert (encoder.shown, writer.written) == ([], [])
        writer.counts = {"prompt_tokens": 14}
        assert (await ask(rig, a_png(), dry_run=True))[0] == 503


async def test_lost_embedding_is_encoded_once_more():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    async with reading([encoder], [writer]) as rig:
        encoder.on_second = lambda: setattr(writer, "refusing", None)
        writer.refusing = (502, "image 0: gone")

        assert (await ask(rig, a_png()))[0] == 200
        assert len(encoder.shown) == 2
        assert references(writer)[0]["url"].rpartition("/")[2] in encoder.kept
        assert len(encoder.kept) == 1
        assert await rig.outcomes() == {"ok": 1}


async def test_missing_response_ends_with_its_reason():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    async with reading([encoder], [writer]) as rig:
        writer.refusing = (502, "image 0: gone")
        status, answer = await ask(rig, a_png())

        assert status == 500
        assert "its images were lost 3 times" in answer["error"]["message"]
        await until(lambda: not encoder.kept)
        assert len(encoder.shown) == 3


async def test_disconnect_leaves_nothing_at_an_encoder():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    async with reading([encoder], [writer]) as rig:
        encoder.gate.clear()
        early = asyncio.create_task(ask(rig, a_png()))
        await until(lambda: encoder.running > 0)
        early.cancel()
        writer.gate.clear()
        late = asyncio.create_task(ask(rig, a_png(9, 9)))
        await until(lambda: rig.router.admission.memory.requests == 1)
        encoder.gate.set()
        await until(lambda: writer.running > 0)
        late.cancel()
        await until(lambda: len(encoder.shown) == 2 and not encoder.kept)
        assert not writer.written[:1] or writer.written[0].ended != "whole"


async def test_image_without_reported_rows_is_encoded_again():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    sound = encoder.model

    def once_odd(inputs):
        answer = sound(inputs)
        return {"references": np.array([b"{}"], dtype=object)} if len(encoder.shown) == 1 else answer

    encoder.model = once_odd
    async with reading([encoder], [writer]) as rig:
        assert (await ask(rig, a_png()))[0] == 200
        assert [one["rows"] for one in references(writer)] == [4]
        assert len(encoder.shown) == 2


@asynccontextmanager
async def serving(encoders, writers, *, apart: bool):
    pipeline = a_choosing_pipeline()
    async with a_rig(pipeline, {"encode": encoders, "text": writers}, ready=False) as rig:
        rig.router.apply_plan(laid_out(pipeline, apart=apart))
        await rig.until_ready()
        await until(lambda: rig.router.state().stages["text"].variant == (PULLS if apart else WHOLE))
        yield rig


def both(name: str = "writer") -> ChatReplica:
    return ChatReplica(name=name, variants=(PULLS, WHOLE))


async def test_without_encoders_images_go_to_colocated_replica():
    writer = both()
    async with serving([], [writer], apart=False) as rig:
        assert rig.router.ready
        image = a_png()
        assert (await ask(rig, image, a_png(9, 9)))[0] == 200

        assert writer.written[0].images[0] == image
        assert "references" not in writer.written[0].inputs
        assert (await ask(rig))[0] == 200
        assert rig.router.state().stages["encode"].rows_per_request == 1.0  # two images in two chats: plans know
        writer.counts = {"prompt_tokens": 14, "text_tokens": 6, "image_tokens": [8]}
        assert (await ask(rig, a_png(), dry_run=True))[1]["usage"]["prompt_tokens"] == 14
        assert writer.counted == []


async def test_colocated_replica_serves_until_encoders_are_ready():
    encoder, writer = Encoder(), both()
    async with serving([], [writer], apart=False) as rig:
        rig.router.apply_plan(laid_out(rig.router.pipeline, apart=True, generation=2))
        assert (await ask(rig, a_png()))[0] == 200
        assert writer.written[-1].images

        await encoder.start()
        rig.router.apply_endpoints(endpoints_of({"encode": [encoder], "text": [writer]}))
        await until(lambda: rig.router.state().stages["text"].variant == PULLS)
        assert (await ask(rig, a_png()))[0] == 200
        assert not writer.written[-1].images
        assert len(references(writer)) == 1
        await encoder.stop()


async def test_chats_waiting_for_colocated_replica_are_encoded():
    encoder, writer = Encoder(), both()
    async with serving([encoder], [writer], apart=False) as rig:
        writer.gate.clear()
        asked = [asyncio.create_task(ask(rig, a_png(9, 9 + number))) for number in range(12)]
        await until(lambda: writer.running == 8 and rig.router.state().stages["text"].queue_rows == 4)

        rig.router.apply_plan(laid_out(rig.router.pipeline, apart=True, generation=2))
        await until(lambda: len(encoder.shown) == 4)
        writer.gate.set()

        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 12
        assert sum("references" in chat.inputs for chat in writer.written) == 4
        assert sum(bool(chat.images) for chat in writer.written) == 8
        assert await rig.outcomes() == {"ok": 12}


async def test_images_waiting_for_encoders_go_to_colocated_replica():
    encoder, writer = Encoder(), both()
    async with serving([encoder], [writer], apart=True) as rig:
        encoder.gate.clear()
        asked = [asyncio.create_task(ask(rig, a_png()))]
        await until(lambda: encoder.running == 1)
        asked += [asyncio.create_task(ask(rig, a_png(9, 9 + number))) for number in range(2)]
        await until(lambda: rig.router.state().stages["encode"].queue_rows == 2)

        rig.router.apply_plan(laid_out(rig.router.pipeline, apart=False, generation=2))
        await until(lambda: sum(bool(chat.images) for chat in writer.written) == 2)
        encoder.gate.set()

        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3
        assert not any("references" in chat.inputs for chat in writer.written)
        await until(lambda: not encoder.kept)  # no replica pulls the embedding of the first image
        assert await rig.outcomes() == {"ok": 3}


async def test_disaggregated_replica_gets_no_unencoded_images():
    whole, pulling = ChatReplica(name="old", variants=(WHOLE,)), ChatReplica(name="new", variants=(PULLS,))
    async with serving([], [whole, pulling], apart=False) as rig:
        rig.router.apply_plan(laid_out(rig.router.pipeline, apart=True, generation=2))
        answers = await asyncio.gather(*(ask(rig, a_png(9, 9 + number)) for number in range(4)))

        assert [status for status, _ in answers] == [200] * 4
        assert (len(whole.written), len(pulling.written)) == (4, 0)
