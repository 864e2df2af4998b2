"""Chats whose images are encoded by one pool and pulled by another, through the whole router over real HTTP."""

import asyncio
from collections import Counter

import numpy as np

from tests.router.chats import ChatReplica, a_png
from tests.router.disaggregated import Encoder, ask, reading, references, shown_by
from tests.router.fakes import until


async def test_each_image_is_a_row_and_references_keep_their_order():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    images = [a_png(8, 8), a_png(40, 30), a_png(90, 90)]
    async with reading([encoder], [writer]) as rig:
        status, answer = await ask(rig, *images)

        assert (status, answer["choices"][0]["message"]["content"]) == (200, "one two")
        found = references(writer)
        assert [one["digest"] for one in found] == [shown_by(image) for image in images]
        assert {one["url"].rpartition("/")[2] for one in found} == encoder.kept
        assert all(
            one["url"].startswith(f"http://127.0.0.1:{encoder.port}/v2/models/small/embeddings/") for one in found
        )
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
