"""Whether images are encoded apart is in the plan: routers follow it, and a change loses nothing."""

import asyncio
from contextlib import asynccontextmanager

from tests.router.chats import ChatReplica, a_png
from tests.router.disaggregated import PULLS, WHOLE, Encoder, a_choosing_pipeline, ask, laid_out, references
from tests.router.fakes import a_rig, endpoints_of, until


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
