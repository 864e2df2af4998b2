"""Chats whose images are encoded by one pool and pulled by another, through the whole router over real HTTP."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from tests.builders import a_variant
from tests.router.chats import INPUTS, ChatReplica, a_chat, a_chat_pipeline, a_png, a_writer
from tests.router.fakes import FakeReplica, a_rig, until
from trimtab_protocol import rest
from trimtab_protocol.chat.inner import kept_together

CHAT = "/v1/chat/completions"


def told(images: np.ndarray) -> np.ndarray:
    """What an encoder tells of images it keeps."""
    references = np.empty(len(images), dtype=object)
    references[:] = [json.dumps({"rows": 4, "digest": f"{len(row[0])}"}).encode() for row in images]
    return references


@dataclass
class Encoder(FakeReplica):
    """Keeps what it is told to keep until it is deleted."""

    kept: set[str] = field(default_factory=set)
    shown: list[tuple[int, ...]] = field(default_factory=list)
    on_second: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = self._encode

    def _encode(self, inputs: Any) -> dict[str, np.ndarray]:
        beside = inputs["chat_images"]
        self.shown += [(len(row[0]), *map(int, of)) for row, of in zip(inputs["images"], beside, strict=True)]
        if len(self.shown) == 2:
            self.on_second()
        keep, rows = self.seen[-1].parameters["keep"], len(inputs["images"])
        self.kept |= {f"{keep}-{row}" for row in range(rows)}
        return {"references": told(inputs["images"])}

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/count"):
            asked = rest.decode_request("m", await request.read(), request.headers.get(rest.HEADER_LENGTH))
            return web.json_response({"rows": [4] * len(asked.inputs[0].array)})
        if request.method != "DELETE":
            return await super()._answer(request)
        self.kept -= set(kept_together(request.path.rpartition("/")[2]))
        return web.json_response({"dropped": True})


def an_encoder() -> dict[str, Any]:
    inputs = [
        {"name": name, "from": f"request.inputs.{name}", "optional": name == "options"}
        for name in ("images", "options")
    ]
    outputs = [{"name": "references", "datatype": "BYTES"}]
    return {"name": "encode", "inputs": inputs, "outputs": outputs, "variants": [a_variant()], "encodes": True}


def parted(encoder: dict[str, Any] | None = None) -> Any:
    read = [{"name": i["name"], "from": f"request.inputs.{i['name']}", "optional": True} for i in INPUTS[:2]]
    read.append({"name": "references", "from": "encode.outputs.references", "optional": True})
    return a_chat_pipeline([encoder or an_encoder(), a_writer(*read)])


@asynccontextmanager
async def reading(encoders, writers, **rig):
    async with a_rig(parted(), {"encode": list(encoders), "text": list(writers)}, **rig) as made:
        yield made


async def ask(rig, *images, **fields):
    async with rig.session.post(rig.url + CHAT, json=a_chat("one two", *images, **fields)) as answer:
        return answer.status, await answer.json()


def references(writer, number=-1):
    return json.loads(writer.written[number].inputs["references"][0])


async def test_each_image_is_a_row_and_the_writer_is_told_where_to_pull_them_in_their_order():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    images = [a_png(8, 8), a_png(40, 30), a_png(90, 90)]
    async with reading([encoder], [writer]) as rig:
        status, answer = await ask(rig, *images)

        assert (status, answer["choices"][0]["message"]["content"]) == (200, "one two")
        found = references(writer)
        assert [one["digest"] for one in found] == [str(len(image)) for image in images]
        assert {one["url"].rpartition("/")[2] for one in found} == encoder.kept
        assert all(
            one["url"].startswith(f"http://127.0.0.1:{encoder.port}/v2/models/small/embeddings/") for one in found
        )
        assert Counter(encoder.shown) == Counter((len(image), 3, which) for which, image in enumerate(images))
        assert "images" not in writer.written[0].inputs


async def test_text_alone_passes_the_encoders_by():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    encoder.gate.clear()
    async with reading([encoder], [writer]) as rig:
        held = asyncio.create_task(ask(rig, a_png()))
        await until(lambda: encoder.running > 0)
        assert (await ask(rig))[0] == 200
        assert "references" not in writer.written[0].inputs
        encoder.gate.set()
        assert (await held)[0] == 200


async def test_images_of_one_chat_go_to_whichever_encoders_are_free():
    encoders = [Encoder(name=f"encoder-{number}", delay_seconds=0.05) for number in range(2)]
    writer = ChatReplica(name="writer")
    async with reading(encoders, [writer], batchSize=8) as rig:
        assert (await ask(rig, *[a_png(8, 8 + number) for number in range(5)]))[0] == 200
        assert sorted(len(encoder.shown) for encoder in encoders) == [2, 3]


async def test_a_dry_run_asks_encoders_for_rows_and_writers_with_images_that_show_nothing():
    counts = {"prompt_tokens": 14, "text_tokens": 6, "image_tokens": [4, 4]}
    encoder, writer = Encoder(), ChatReplica(name="writer", counts=counts)
    async with reading([encoder], [writer]) as rig:
        status, answer = await ask(rig, a_png(), a_png(9, 9), dry_run=True)

        assert (status, answer["usage"]["prompt_tokens"]) == (200, 14)
        assert writer.counted == [[{"url": "blank:", "rows": 4}] * 2]
        assert (encoder.shown, writer.written) == ([], [])
        writer.counts = {"prompt_tokens": 14}
        assert (await ask(rig, a_png(), dry_run=True))[0] == 503


async def test_what_cannot_be_pulled_is_encoded_once_more():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    async with reading([encoder], [writer]) as rig:
        encoder.on_second = lambda: setattr(writer, "refusing", None)
        writer.refusing = (502, "image 0: gone")

        assert (await ask(rig, a_png()))[0] == 200
        assert len(encoder.shown) == 2
        assert references(writer)[0]["url"].rpartition("/")[2] in encoder.kept
        assert len(encoder.kept) == 1
        assert await rig.outcomes() == {"ok": 1}


async def test_an_answer_that_never_comes_ends_with_its_reason():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    async with reading([encoder], [writer]) as rig:
        writer.refusing = (502, "image 0: gone")
        status, answer = await ask(rig, a_png())

        assert status == 500
        assert "its images was lost 3 times" in answer["error"]["message"]
        await until(lambda: not encoder.kept)
        assert len(encoder.shown) == 3


async def test_a_writer_that_dies_before_its_first_word_costs_an_encoding_and_no_chat():
    encoder = Encoder()
    writers = [ChatReplica(name=f"writer-{number}", break_after=0) for number in range(2)]
    writers[1].break_after = None
    async with reading([encoder], writers) as rig:
        assert [(await ask(rig, a_png(9, number)))[0] for number in (9, 10, 11)] == [200, 200, 200]
        assert len(encoder.shown) == 4
        assert await rig.outcomes() == {"ok": 3}


async def test_who_hangs_up_leaves_nothing_at_an_encoder():
    encoder, writer = Encoder(), ChatReplica(name="writer")
    async with reading([encoder], [writer]) as rig:
        encoder.gate.clear()
        early = asyncio.create_task(ask(rig, a_png()))
        await until(lambda: encoder.running > 0)
        early.cancel()
        writer.gate.clear()
        late = asyncio.create_task(ask(rig, a_png(9, 9)))
        await until(lambda: rig.router.budget.requests == 1)
        encoder.gate.set()
        await until(lambda: writer.running > 0)
        late.cancel()
        await until(lambda: len(encoder.shown) == 2 and not encoder.kept)
        assert not writer.written[:1] or writer.written[0].ended != "whole"
