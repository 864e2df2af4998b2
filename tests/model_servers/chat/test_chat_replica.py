"""A real replica with colocated and disaggregated chat models, and one whose engine fails."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from prometheus_client.parser import text_string_to_metric_families

from tests.lmm_digits_answers import decode_answer, page_inputs
from tests.model_servers.chat.chat_client import (
    ChatClient,
    a_chat,
    a_chat_spec,
    a_page,
    files,
    rows_of_files,
    text_of,
    texts,
)
from tests.model_servers.chat.test_image_decoder import hostile_png
from tests.model_servers.conftest import Replica, serve
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.engine.core import EngineCore
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES, Architecture
from trimtab_model_servers.families.lmm_digits.tokenizer import prompt
from trimtab_model_servers.server.hosted_model import load
from trimtab_model_servers.server.model_registry import ModelRegistry
from trimtab_model_servers.server.settings import write_models
from trimtab_protocol import InferRequest, InferResponse, Tensor
from trimtab_protocol.chat.internal_wire import TENANTS, dump_tenants

SMALL = {"slots": 4, "slot_tokens": 400, "step_tokens": 40}
FATAL_TOKENS = 13
NAMES = {"decoder-only": "colocated", "cross-attention": "across"}


@pytest.fixture(scope="module")
def replica(tmp_path_factory, start: Callable[[Path], Replica | str]) -> Replica:
    folder = tmp_path_factory.mktemp("chats")
    specs = [a_chat_spec(part, parameters=SMALL) for part in ("colocated", "text", "encode", "keep")]
    specs.append(a_chat_spec("keep", "one-by-one", parameters=SMALL, maxBatchSize=1))
    specs.append(a_chat_spec("colocated", "across", parameters=SMALL | {"architecture": "cross-attention"}))
    write_models(specs, folder)
    started = start(folder)
    assert isinstance(started, Replica), started
    return started


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[ChatClient]:
    async with aiohttp.ClientSession() as session:
        yield ChatClient(session, replica.ports)


def alone(architecture: Architecture, text: str, images: int, tokens: int) -> str:
    """Text that transformers' ``generate`` returns on copies of page 1."""
    loaded = models.random_model(1, architecture)
    ids = prompt(loaded.tokenizer, text, images, page_tokens=models.placeholders(architecture))
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    if images:
        page = torch.from_numpy(np.array(Pillow.open(io.BytesIO(a_page(1)))))
        inputs |= page_inputs(architecture, inputs["input_ids"], page.expand(images, 1, 96, 96))
    with torch.inference_mode():
        written = loaded.model.generate(**inputs, max_new_tokens=tokens)
    text = decode_answer(loaded.tokenizer, written[0, len(ids) :].tolist())
    return text.rstrip("\ufffd")  # an incomplete character is not released


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_outputs_equal_generate_with_and_without_images(client: ChatClient, architecture):
    name = NAMES[architecture]
    for images, text in ((0, "What is 3+4?"), (1, "Read the cells."), (2, "Which page shows more digits?")):
        asked = a_chat(name, text, *[a_page(1)] * images, max_tokens=9, ignore_eos=True)
        expected = alone(architecture, text, images, tokens=9)
        assert text_of(await client.infer(asked)) == [expected]
        heard = await client.stream(asked)
        assert (heard.status, heard.text, len(heard.events)) == (200, expected, 10)
        usage = heard.events[-1]["usage"]
        assert heard.events[-1]["finish_reason"] == "length"
        assert usage["completion_tokens"] == 9
        assert usage["image_tokens"] == 16 * images
        assert (await client.count(asked))["prompt_tokens"] == usage["prompt_tokens"]


async def test_rows_of_a_request_generate_concurrently(client: ChatClient):
    rows = [b'[{"role":"user","content":"%d+1="}]' % number for number in range(6)]
    options = [b'{"max_tokens":%d,"ignore_eos":true}' % number for number in range(1, 7)]
    request = InferRequest("colocated", (texts("messages", *rows), texts("options", *options)))

    response = await client.infer(request)

    assert [usage[1] for usage in response.outputs[2].array.tolist()] == [1, 2, 3, 4, 5, 6]


async def test_disaggregated_stages_equal_colocated_model(client: ChatClient):
    pages = [a_page(seed) for seed in (3, 4)]
    colocated = text_of(await client.infer(a_chat("colocated", "Read page 2.", *pages, max_tokens=12)))

    encoded = await client.infer(InferRequest("encode", (files(*pages),)))
    inline = a_chat("text", "Read page 2.", extra=encoded.outputs, max_tokens=12)
    reported = json.loads(inline.inputs[0].array[0])
    reported[0]["content"] = [{"type": "image"}, {"type": "image"}, *reported[0]["content"]]
    spelled = texts("messages", json.dumps(reported).encode())

    assert text_of(await client.infer(InferRequest("text", (spelled, *inline.inputs[1:])))) == colocated


def stored(response: InferResponse) -> list[dict[str, Any]]:
    return [json.loads(image) for image in response.outputs[0].array]


def asked_about(references: list[dict[str, Any]]) -> InferRequest:
    content = [*({"type": "image"} for _ in references), {"type": "text", "text": "Read page 2."}]
    return InferRequest(
        "text",
        (
            texts("messages", json.dumps([{"role": "user", "content": content}]).encode()),
            texts("references", json.dumps(references).encode()),
            texts("options", b'{"max_tokens": 12}'),
        ),
    )


@pytest.mark.parametrize("late", [False, True])
async def test_text_stage_fetches_embeddings_before_or_after_encoding(client: ChatClient, late):
    pages = [a_page(seed) for seed in (3, 4)]
    colocated = await client.stream(a_chat("colocated", "Read page 2.", *pages, max_tokens=12))
    encoding = InferRequest("keep", (rows_of_files(*pages),), parameters={"store_as": f"kept-{late}"})
    where = [{"url": f"{client.url}/keep/embeddings/kept-{late}-{row}", "rows": 16} for row in range(2)]
    if late:
        answering = asyncio.create_task(client.stream(asked_about(where)))
        await client.infer(encoding)
        heard = await answering
    else:
        reported = stored(await client.infer(encoding))
        assert [one["rows"] for one in reported] == [16, 16]
        assert (await client.get("keep/pending"))["stored_embeddings"] == 2
        heard = await client.stream(asked_about([at | one for at, one in zip(where, reported, strict=True)]))

    assert (heard.text, heard.error) == (colocated.text, None)
    assert (await client.get("keep/pending"))["stored_embeddings"] == 0


async def test_text_stage_waits_for_pending_images(client: ChatClient):
    pages = [a_page(seed) for seed in (3, 4)]
    colocated = await client.stream(a_chat("colocated", "Read page 2.", *pages, max_tokens=12))
    keep = InferRequest("keep", (rows_of_files(*pages),), parameters={"store_as": "reported"})
    announced = stored(await client.infer(replace(keep, parameters={})))
    assert (await client.get("keep/pending"))["stored_embeddings"] == 0, "images without a name are not stored"
    asked = replace(asked_about([{"url": "pending:"} | one for one in announced]), id="a chat of its own")
    answering = asyncio.create_task(client.stream(asked))
    await client.infer(keep)
    for number, one in enumerate(announced):
        arrived = [{"image": number, "url": f"{client.url}/keep/embeddings/reported-{number}", **one}]
        assert await client.post_json("text/references/a chat of its own", arrived) == {"resolved": 1}

    heard = await answering
    assert (heard.text, heard.error) == (colocated.text, None)
    assert (await client.get("keep/pending"))["stored_embeddings"] == 0
    assert (await client.refused(replace(asked, id="")))[0] == 400
    assert (await client.get("text"))["parameters"]["partial_prefill"] is True
    assert (await client.get("across"))["parameters"]["partial_prefill"] is False


async def test_stored_embeddings_get_further_names(client: ChatClient):
    keep = InferRequest("keep", (rows_of_files(a_page(5)),), parameters={"store_as": "shared"})
    encoding = asyncio.create_task(client.infer(keep))
    await client.post_json("keep/embeddings/shared-1,2", {"of": "shared-0"})
    (reported,) = stored(await encoding)
    for row in (2, 0, 1):
        reference = {"url": f"{client.url}/keep/embeddings/shared-{row}", **reported}
        assert (await client.stream(asked_about([reference, {"url": "blank:", "rows": 16}]))).status == 200
    assert (await client.get("keep/pending"))["stored_embeddings"] == 0


async def test_cached_image_is_stored_for_its_tenant_alone(client: ChatClient):
    page = a_page(123)
    asked = InferRequest("keep", (rows_of_files(page),), parameters={TENANTS: dump_tenants(["one"])})
    (reported,) = stored(await client.infer(asked))
    shown = {"file": sha256(page).hexdigest(), "tenant": "one", "alone": True}
    assert await client.post_json("keep/embeddings/again-0", {"of": shown}) == reported
    assert (await client.get("keep/pending"))["stored_embeddings"] == 1
    reference = {"url": f"{client.url}/keep/embeddings/again-0", **reported}
    assert (await client.stream(asked_about([reference, {"url": "blank:", "rows": 16}]))).status == 200

    for other in ({"tenant": "other"}, {"alone": False}, {"file": "0" * 64}):
        refused = await client.post_json("keep/embeddings/again-0", {"of": shown | other})
        assert "not cached" in refused["error"]
    assert (await client.get("keep/pending"))["stored_embeddings"] == 0


@pytest.mark.parametrize(
    ("tenant", "options", "shares"),
    [
        ("one", {}, True),
        ("", {}, False),
        (None, {}, False),
        (None, {"tenant": "one"}, False),
        ("two", {"tenant": "one"}, False),
    ],
)
async def test_caches_are_shared_within_a_known_tenant(client: ChatClient, tenant, options, shares):
    number = 10 * len(options) + (5 if tenant is None else len(tenant))  # of a page that no other case sends

    def asked(tenant: str | None, /, **options: Any) -> InferRequest:
        chat = a_chat("colocated", "what is it", a_page(700 + number), **options)
        named = {} if tenant is None else {TENANTS: dump_tenants([tenant])}
        return replace(chat, parameters={**chat.parameters, **named})

    await client.stream(asked("one", max_tokens=1))
    encoded = await client.encoded_images("colocated")
    again = await client.stream(asked(tenant, max_tokens=1, **options))

    assert (again.events[-1]["usage"]["cached_tokens"] > 0) == shares
    assert (await client.encoded_images("colocated") == encoded) == shares


async def test_encoder_counts_more_images_than_its_batch_size(client: ChatClient):
    shown = InferRequest("one-by-one", (rows_of_files(*map(a_page, range(16))),))
    assert await client.count(shown) == {"rows": [16] * 16}
    assert (await client.refused(shown))[0] == 400


@pytest.mark.parametrize(("file", "why"), [(b"GIF89a and no more", "is no PNG"), (a_page()[:300], "cannot be decoded")])
async def test_invalid_image_is_named_and_its_batch_not_stored(client: ChatClient, file: bytes, why: str):
    of_chat = Tensor("chat_images", "INT64", np.array([[1, 0], [5, 3]], dtype=np.int64))
    batch = InferRequest("keep", (rows_of_files(a_page(5), file), of_chat), parameters={"store_as": "numbered"})
    chat = a_chat("colocated", "?", a_page(5), file)

    for number, asked in ((3, batch), (1, chat)):
        code, error = await client.refused(asked)
        assert code == 422
        assert f"image {number} {why}" in error
    assert (await client.get("keep/pending"))["stored_embeddings"] == 0


async def test_disconnect_releases_all_resources(client: ChatClient):
    asked = a_chat("colocated", "Count.", a_page(9), max_tokens=350, ignore_eos=True)
    for _ in range(5):
        async with client.post(asked, "generate_stream") as answer:
            await answer.content.readline()
            answer.close()

    for _ in range(100):
        left = await client.get("colocated/pending")
        if not any(number for name, number in left.items() if name != "slots"):
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail(f"after a second there is left: {left}")


REFUSED = {
    "an unknown option": (a_chat("colocated", "?", temprature=1), 400, "temprature"),
    "more places than images": (
        InferRequest("colocated", a_chat("colocated", "?", a_page()).inputs[:1]),
        400,
        "0 came",
    ),
    "no image": (a_chat("colocated", "?", b"GIF89a and no more"), 422, "image 0"),
    "too long an answer": (a_chat("colocated", "?", max_tokens=4000), 400, "at most 400"),
    "no messages": (InferRequest("colocated", (texts("messages", b"[]"),)), 400, "messages"),
    "no JSON": (InferRequest("colocated", (texts("messages", b"{"),)), 400, "not JSON"),
    "the assistant's last word": (
        InferRequest("colocated", (texts("messages", b'[{"role":"assistant","content":"7"}]'),)),
        400,
        "must be the user's",
    ),
}


@pytest.mark.parametrize("action", ["infer", "generate_stream"])
@pytest.mark.parametrize(("request_", "status", "words"), REFUSED.values(), ids=REFUSED)
async def test_invalid_request_is_rejected_with_reason(client: ChatClient, request_, status, words, action):
    code, error = await client.refused(request_, action)

    assert code == status
    assert words in error


@pytest.mark.parametrize("action", ["infer", "generate_stream", "count"])
async def test_overlong_prompt_is_rejected_on_every_way(client: ChatClient, action: str):
    code, error = await client.refused(a_chat("colocated", "7" * 450, max_tokens=1), action)

    assert (code, "should be at most" in error) == (400, True)


async def test_failed_fetch_ends_its_chat_and_names_the_image(client: ChatClient):
    gone = {"url": "http://127.0.0.1:9/v2/models/encode/embeddings/gone", "rows": 16}

    code, error = await client.refused(asked_about([gone]), "generate_stream")

    assert (code, "image 0" in error) == (502, True)


async def test_placeholder_in_text_stays_text(client: ChatClient):
    assert (await client.count(a_chat("colocated", "<|image|><|end|>")))["image_tokens"] == []


async def test_metrics_have_load_and_totals(client: ChatClient, replica: Replica):
    await client.infer(a_chat("colocated", "?", a_page(77), max_tokens=1))
    async with aiohttp.ClientSession() as session:
        answer = await session.get(f"http://127.0.0.1:{replica.ports.data_port}/metrics")
        reported = {one.name: one for one in text_string_to_metric_families(await answer.text())}

    pending = {
        (one.labels["model"], one.labels["kind"]): one.value
        for one in reported["trimtab_pending_prefill_tokens"].samples
    }
    encoded = {one.labels["model"]: one.value for one in reported["trimtab_encoded_images"].samples}
    assert pending["colocated", "text"] == pending["colocated", "image"] == pending["encode", "image"] == 0
    assert encoded["colocated"] >= 1
    assert reported["trimtab_event_loop_lag_seconds"].samples[0].value >= 0


async def test_hostile_chats_do_not_pause_other_chats(client: ChatClient, replica: Replica):
    """Unpacking metadata of a gigabyte, or tokenizing a megabyte, on the event loop takes seconds."""
    page = hostile_png(Pillow.new("L", (96, 96)))
    pages = [page + bytes([number]) for number in range(12)]  # files that are not equal

    async def status(request: InferRequest, action: str) -> int:
        async with client.post(request, action) as answer:
            await answer.read()
            return int(answer.status)

    hostile = [
        status(a_chat("colocated", "?", *pages, max_tokens=1), "infer"),
        status(InferRequest("keep", (rows_of_files(*pages),)), "count"),
        *(status(a_chat("colocated", "What is this? " * 70_000), "count") for _ in range(4)),
    ]
    sent = asyncio.gather(*hostile)
    longest_seconds, loop = 0.0, asyncio.get_running_loop()
    async with aiohttp.ClientSession() as session:
        while not sent.done():
            asked_at = loop.time()
            async with session.get(f"http://127.0.0.1:{replica.ports.data_port}/v2/health/live") as answer:
                assert answer.status == 200
            longest_seconds = max(longest_seconds, loop.time() - asked_at)
            await asyncio.sleep(0.005)

    assert await sent == [200, 200, 400, 400, 400, 400]
    assert longest_seconds < 0.5


class FailingCore(EngineCore):
    """An engine that fails on a request for ``FATAL_TOKENS`` tokens."""

    def submit(self, request: Any, *arguments: Any) -> None:
        super().submit(request, *arguments)
        self.failing = request.max_new_tokens == FATAL_TOKENS

    def step(self) -> bool:
        if self.failing:
            raise ZeroDivisionError("an engine failure")
        return super().step()

    failing = False


def serve_mortal(folder: str, connection: Connection) -> None:
    """Run a replica whose engine may fail."""
    from trimtab_model_servers.chat import chat_model  # noqa: PLC0415  (only in the forked child)

    vars(chat_model)["EngineCore"] = FailingCore
    serve(folder, connection)


@pytest.fixture
def fatal() -> InferRequest:
    return a_chat("colocated", "What is 3+4?", max_tokens=FATAL_TOKENS)


async def test_replica_with_failed_engine_is_not_ready(monkeypatch, fatal):
    monkeypatch.setattr("trimtab_model_servers.chat.chat_model.EngineCore", FailingCore)
    registry = ModelRegistry(expected={"colocated"})
    model = await registry.worker.run(lambda: load(a_chat_spec("colocated", parameters=SMALL), registry.worker))
    registry.add_model("colocated", model)
    assert (registry.ready, registry.serving) == (True, True)
    try:
        with pytest.raises(Exception, match="the engine failed: ZeroDivisionError"):
            await model.infer(fatal, registry.worker)
        await registry.model_failed.wait()
        assert (registry.ready, registry.serving) == (False, False)
        assert "ZeroDivisionError" in registry.failed_models["colocated"]
    finally:
        await cast("ChatModel", model).close()
        registry.worker.close()


async def test_replica_with_failed_engine_ends(start, tmp_path, fatal):
    write_models([a_chat_spec("colocated", parameters=SMALL)], tmp_path)
    running = start(tmp_path, serve_mortal)
    assert isinstance(running, Replica), running
    async with aiohttp.ClientSession() as session:
        status, why = await ChatClient(session, running.ports).refused(fatal)
    await asyncio.to_thread(running.process.join, 30)

    assert (status, "the engine failed" in why) == (500, True)
    assert running.process.exitcode is not None
