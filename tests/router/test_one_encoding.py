"""An image that many chats show at one instant is encoded once, whichever encoder gets it."""

import asyncio

import pytest

from tests.router.chats import ChatReplica
from tests.router.disaggregated import Encoder, a_picture, ask, reading, references
from tests.router.fakes import endpoints_of, until
from trimtab_router.execution import chat_images


def two_encoders(**changes):
    encoders = [Encoder(name=f"encoder-{number}", **changes) for number in range(2)]
    for encoder in encoders:
        encoder.gate.clear()
    return encoders


def shown(encoders):
    return sum(len(encoder.shown) for encoder in encoders)


def riding(rig):
    return rig.router.schedulers["encode"].snapshot().joined_rows


async def many(rig, count, *pictures, **fields):
    chats = [asyncio.create_task(ask(rig, *pictures, **fields)) for _ in range(count)]
    await until(lambda: riding(rig) == (count - 1) * len(pictures))
    return chats


async def leading(encoders):
    await until(lambda: any(encoder.running for encoder in encoders))
    return next(encoder for encoder in encoders if encoder.running)


async def test_same_image_is_encoded_once_and_pulled_by_each_chat():
    encoders, writer = two_encoders(), ChatReplica(name="writer")
    async with reading(encoders, [writer]) as rig:
        chats = await many(rig, 12, a_picture(1))
        for chat in (chats.pop(3), chats.pop(0)):  # the latter has brought the row that is encoded
            chat.cancel()
        await until(lambda: rig.router.admission.memory.requests == 10)
        for encoder in encoders:
            encoder.gate.set()

        assert [(await chat)[0] for chat in chats] == [200] * 10
        assert shown(encoders) == 1
        urls = {references(writer, number)[0]["url"] for number in range(10)}
        assert len(urls) == 10
        await until(lambda: sum(len(encoder.kept) for encoder in encoders) == 10)
        assert {url.rpartition("/")[2] for url in urls} == set.union(*(encoder.kept for encoder in encoders))
        assert await rig.outcomes() == {"ok": 10, "dropped": 2}
        assert rig.value("trimtab_encoder_dedup_total", stage="encode", source="inflight") == 11
        assert rig.router.schedulers["encode"].snapshot().encodings_in_flight == 0


async def test_row_is_encoded_by_itself_if_sharing_fails():
    encoders, writer = two_encoders(shares=False), ChatReplica(name="writer")
    async with reading(encoders, [writer]) as rig:
        chats = await many(rig, 6, a_picture(1))
        for encoder in encoders:
            encoder.gate.set()
        assert [(await chat)[0] for chat in chats] == [200] * 6
        assert await rig.outcomes() == {"ok": 6}
        assert shown(encoders) == 6
        assert sum(len(encoder.seen) for encoder in encoders) <= 3  # side by side, not one after the other


@pytest.mark.parametrize("caches", [True, False])
async def test_recent_producer_is_asked_before_encoding_again(caches):
    encoders, writer = [Encoder(name=f"encoder-{number}", caches=caches) for number in range(2)], ChatReplica(name="w")
    async with reading(encoders, [writer]) as rig:
        headers = {"x-trimtab-client": "one"}
        for _ in range(6):
            assert (await ask(rig, a_picture(1), a_picture(2), headers=headers))[0] == 200
        assert shown(encoders) == (2 if caches else 12)
        asked = [of for encoder in encoders for of in encoder.asked]
        assert asked == ([("one", False)] * 10 if caches else [])
        if caches:
            assert rig.value("trimtab_encoder_dedup_total", stage="encode", source="cache") == 10
        urls = [one["url"] for number in range(6) for one in references(writer, number)]
        assert len({*urls}) == 12
        assert {url.rpartition("/")[2] for url in urls} == set.union(*(encoder.kept for encoder in encoders))

        assert (await ask(rig, a_picture(1), headers={"x-trimtab-client": "other"}))[0] == 200
        assert shown(encoders) == (3 if caches else 13)
        assert await rig.outcomes() == {"ok": 7}


async def test_image_of_lost_or_slow_producer_is_encoded_again():
    encoders = [Encoder(name=f"encoder-{number}", caches=True) for number in range(2)]
    async with reading(encoders, [ChatReplica(name="writer")]) as rig:
        assert (await ask(rig, a_picture(1)))[0] == 200
        home = next(encoder for encoder in encoders if encoder.shown)
        other = next(encoder for encoder in encoders if encoder is not home)
        home.answers = asyncio.Event()
        assert (await ask(rig, a_picture(1)))[0] == 200
        assert shown(encoders) == 2
        home.answers.set()
        await home.kill()
        assert (await ask(rig, a_picture(1)))[0] == 200
        assert len(other.shown) >= 1


async def test_disconnect_while_asking_a_producer_leaves_nothing():
    encoder = Encoder(caches=True)
    async with reading([encoder], [ChatReplica(name="writer")]) as rig:
        assert (await ask(rig, a_picture(1)))[0] == 200
        encoder.kept.clear()
        encoder.answers = asyncio.Event()
        late = asyncio.create_task(ask(rig, a_picture(1)))
        await until(lambda: encoder.waiting == 1)
        late.cancel()
        await until(lambda: rig.router.admission.memory.requests == 0)
        encoder.answers.set()
        await until(lambda: len(encoder.asked) == 1 and not encoder.kept)


async def test_retired_encoder_answers_a_pending_question_first():
    encoders, writer = [Encoder(name=f"encoder-{number}", caches=True) for number in range(2)], ChatReplica(name="w")
    async with reading(encoders, [writer]) as rig:
        assert (await ask(rig, a_picture(1)))[0] == 200
        home = next(encoder for encoder in encoders if encoder.shown)
        home.answers = asyncio.Event()
        asked = asyncio.create_task(ask(rig, a_picture(1)))
        await until(lambda: home.waiting == 1)
        others = [encoder for encoder in encoders if encoder is not home]
        rig.router.apply_endpoints(endpoints_of({"encode": others, "text": [writer]}))
        for _ in range(20):  # turns of the loop: a replica that holds nothing has closed by then
            await asyncio.sleep(0)
        home.answers.set()

        assert (await asked)[0] == 200
        assert (shown(encoders), len(home.asked)) == (1, 1)


async def test_image_is_encoded_again_if_producer_cannot_be_asked(monkeypatch):
    encoder = Encoder(caches=True)
    async with reading([encoder], [ChatReplica(name="writer")]) as rig:
        assert (await ask(rig, a_picture(1)))[0] == 200
        monkeypatch.setattr(chat_images, "image_lookup", None)
        assert (await ask(rig, a_picture(1)))[0] == 200
        assert len(encoder.shown) == 2
        assert await rig.outcomes() == {"ok": 2}
