"""Chats through the router over real HTTP, with fake model servers."""

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from tests.router.chats import ChatReplica, a_chat, a_chat_pipeline, a_png, events, words_of
from tests.router.fakes import a_rig, grpc_refusal
from trimtab_protocol import InferRequest, Tensor
from trimtab_router.limits import Limits
from trimtab_router.router import COUNTS_AT_ONCE

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def chatting(*replicas, pipeline=None, **rig):
    async with a_rig(pipeline or a_chat_pipeline(), {"text": list(replicas)}, **rig) as made:
        yield made


async def ask(rig, chat, **headers):
    async with rig.session.post(rig.url + CHAT, json=chat, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


async def tell(rig, chat):
    async with rig.session.post(rig.url + CHAT, json=chat | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return events(await answer.read())


async def test_complete_response_and_its_upstream_request():
    replica = ChatReplica()
    async with chatting(replica) as rig:
        chat = a_chat("one two", a_png(), max_tokens=1, seed=5)
        status, body, headers = await ask(rig, chat, **{"x-request-id": "abc"})

        assert (status, headers["x-request-id"], body["id"]) == (200, "abc", "chatcmpl-abc")
        assert body["choices"][0]["message"]["content"] == "one"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["system_fingerprint"] == "small"
        assert body["usage"]["prompt_tokens_details"]["image_tokens"] == 4
        (written,) = replica.written
        assert written.images == [a_png()]
        content = [{"type": "text", "text": "one two"}, {"type": "image"}]
        assert written.messages == [{"role": "user", "content": content}]
        assert 50.0 < written.options.pop("deadline_seconds") < 60.0
        assert written.options == {"max_tokens": 1, "seed": 5, "tenant": "127.0.0.1"}
        assert await rig.outcomes() == {"ok": 1}
        assert rig.value("trimtab_tokens_total", modality="image", direction="in") == 14


async def test_prompt_lengths_are_those_of_admitted_requests():
    chat, replica = a_chat("one two", a_png()), ChatReplica()
    async with chatting(replica) as rig:
        for known in (None, None, pytest.approx(14.0, rel=0.05)):  # ten of words and four of the image
            assert rig.router.state().stages["text"].prompt_tokens == known
            assert (await ask(rig, chat))[0] == 200

        replica.refusing = (400, "the prompt is too long")
        assert (await ask(rig, a_chat("word " * 25_000)))[0] == 400
        assert rig.router.state().stages["text"].prompt_tokens == pytest.approx(14.0, rel=0.05)


async def test_idle_stream_sends_keep_alives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trimtab_router.ingress.sse.ALIVE_SECONDS", 0.02)
    replica = ChatReplica(stepped=True)
    async with chatting(replica) as rig:
        asking = asyncio.create_task(rig.session.post(rig.url + CHAT, json=a_chat("one two", stream=True)))
        await rig.until(lambda: replica.running == 1)
        await asyncio.sleep(0.05)
        assert not asking.done()
        replica.steps.release()
        async with await asking as answer:
            while await answer.content.readuntil(b"\n\n") != b": \n\n":
                pass
            replica.steps.release()
            assert words_of(events((await answer.read()).replace(b": \n\n", b""))) == "two"


async def test_choices_are_rows_of_their_own_in_one_stream():
    replica = ChatReplica(alive=True)
    async with chatting(replica) as rig:
        body = await tell(rig, a_chat("a b c", n=3, seed=7, stream_options={"include_usage": True}))

        assert body.pop() == "[DONE]"
        assert {event["system_fingerprint"] for event in body} == {"small"}
        assert body.pop()["usage"]["completion_tokens"] == 9
        assert [words_of(body, choice) for choice in range(3)] == ["a b c"] * 3
        assert sorted(written.options["seed"] for written in replica.written) == [7, 8, 9]
        ends = [e["choices"][0]["index"] for e in body if e["choices"][0]["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_disconnect_cancels_generation_at_once(stream, begun):
    replica = ChatReplica(stepped=True)
    async with chatting(replica) as rig:
        asking = asyncio.ensure_future(ask(rig, a_chat("one two three", stream=stream)))
        await rig.until(lambda: replica.running == 1)
        if begun:
            replica.steps.release()
            await rig.until(lambda: rig.value("trimtab_stage_rows_total") == 1)
        asking.cancel()
        await rig.until(lambda: replica.running == 0)

        assert replica.written[0].ended == "left"
        await rig.until(lambda: rig.value("trimtab_requests_in_flight") == 0)
        assert rig.router.state().stages["text"].endpoints["replica-0"].inflight_batches == 0
        assert rig.value("trimtab_cancelled_rows_total", stage="text") == 1
        assert await rig.outcomes() == {"dropped": 1}


@pytest.mark.parametrize("breaks", ["die", "error", "end"])
async def test_a_stream_that_is_cut_says_so_and_counts_as_failed(breaks):
    replica = ChatReplica(break_after=2, breaks=breaks)
    async with chatting(replica) as rig:
        body = await tell(rig, a_chat("one two three"))

        assert words_of(body) == "one two "
        assert body[-1]["error"]["code"] == "AnswerCut"
        assert "in the middle of the answer" in body[-1]["error"]["message"]
        assert "logits" not in json.dumps(body)
        assert await rig.outcomes() == {"failed": 1}
        assert rig.value("trimtab_refusals_total", reason="AnswerCut") == 1


@pytest.mark.parametrize("breaks", ["die", "error"])
async def test_retried_response_keeps_its_deadline(breaks):
    pipeline = a_chat_pipeline(slo={"latency": "60s", "timeToFirstToken": "1s"}, dropPolicy="Expired")
    replica = ChatReplica(stepped=True, break_after=1, breaks=breaks)
    async with chatting(replica, pipeline=pipeline, batchSize=1) as rig:
        asked = asyncio.create_task(ask(rig, a_chat("one two")))
        replica.steps.release()
        await rig.until(lambda: rig.value("trimtab_stage_rows_total", stage="text") == 1)
        assert (await ask(rig, a_chat("waits until its first piece is due")))[0] == 504
        for _ in range(3):
            replica.steps.release()

        status, body, _ = await asked
        assert (status, body["choices"][0]["message"]["content"]) == (200, "one two")
        assert [written.ended for written in replica.written] == [breaks, "whole"]
        assert await rig.outcomes() == {"ok": 1, "dropped": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusing", "status", "kind"),
    [
        ((400, "too long: 900 tokens"), 400, "invalid_request_error"),
        ((422, "no image"), 400, "invalid_request_error"),
        ((500, "torch"), 500, "server_error"),
    ],
)
async def test_replica_rejection_has_a_status_and_no_stream(refusing, status, kind, stream):
    async with chatting(ChatReplica(refusing=refusing)) as rig:
        got, body, headers = await ask(rig, a_chat(stream=stream))

        assert (got, body["error"]["type"]) == (status, kind)
        assert ("torch" in body["error"]["message"]) is False
        assert headers.get("x-should-retry") == ("false" if status == 500 else None)
        assert sum((await rig.outcomes()).values()) == 1


async def test_what_is_wrong_with_a_chat_is_said_in_the_clients_form():
    async with chatting(ChatReplica()) as rig:
        for chat, status, param, code in [
            (a_chat(tools=[{}]), 400, "tools", "unsupported_parameter"),
            (a_chat(model="other"), 404, None, "model_not_found"),
            (a_chat("hi", b"no image"), 400, "messages[0].content[1].image_url", "invalid_image"),
            (a_chat("hi", "http://127.0.0.1:1/a.png"), 400, "messages[0].content[1].image_url", "invalid_image_url"),
            (a_chat("hi", *[a_png()] * 17), 400, "messages", "too_many_images"),
        ]:
            got, body, _ = await ask(rig, chat)
            assert (got, body["error"]["param"], body["error"]["code"]) == (status, param, code), body
        assert await rig.outcomes() == {"refused": 5}


def rows_of_images(*images: bytes) -> InferRequest:
    content = [{"type": "text", "text": "hi"}, *[{"type": "image"}] * len(images)]
    message = json.dumps([{"role": "user", "content": content}]).encode()
    files = np.empty((1, len(images)), dtype=object)
    files[0, :] = images
    texts = Tensor("messages", "BYTES", np.array([message], dtype=object))
    return InferRequest("sample", (texts, Tensor("images", "BYTES", files)))


LIMITS = {"images": {"maxPerRequest": 2, "maxMegapixels": 0.001, "maxBytes": 1024}}


@pytest.mark.parametrize(
    "images",
    [[a_png()] * 3, [a_png(), a_png(32, 32)], [a_png() + bytes(1024)], [b"no image"]],
    ids=["count", "pixels", "bytes", "format"],
)
async def test_bounds_of_images_hold_for_every_protocol(images):
    replica, pipeline = ChatReplica(), a_chat_pipeline(chat=LIMITS)
    async with chatting(replica, pipeline=pipeline) as rig:
        assert (await ask(rig, a_chat("hi", *images)))[0] == 400
        assert (await rig.rest(rows_of_images(*images)))[0] == 400
        code, _ = await grpc_refusal(rig.grpc(rows_of_images(*images)))

        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert (await rig.outcomes(), replica.written) == ({"refused": 3}, [])
        assert (await rig.rest(rows_of_images(a_png(), a_png())))[0] == 200


async def test_bound_of_messages_holds_for_every_protocol():
    message = json.dumps([{"role": "user", "content": "a" * 2**16}]).encode()
    request = InferRequest("sample", (Tensor("messages", "BYTES", np.array([message], dtype=object)),))
    replica = ChatReplica()
    async with chatting(replica, limits=Limits(max_json_bytes=2**16)) as rig:
        assert (await ask(rig, a_chat("a" * 2**16)))[0] in {400, 413}
        assert (await rig.rest(request))[0] == 400
        code, _ = await grpc_refusal(rig.grpc(request))

        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert (await rig.outcomes(), replica.written) == ({"refused": 3}, [])


async def test_models_are_listed():
    async with chatting(ChatReplica()) as rig:
        _, body = await rig.get("/v1/models")
        assert [model["id"] for model in body["data"]] == ["sample"]
        assert (await rig.get("/v1/models/sample"))[1]["object"] == "model"
        assert (await rig.get("/v1/models/other"))[0] == 404
        assert (await rig.get("/v1/other"))[0] == 404


async def test_a_dry_run_counts_and_runs_nothing():
    replica = ChatReplica(counts={"prompt_tokens": 22, "text_tokens": 6, "image_tokens": [16], "encoded_tokens": [16]})
    async with chatting(replica) as rig:
        status, body, _ = await ask(rig, a_chat("hi", a_png(), dry_run=True))

        assert (status, body["choices"], replica.written) == (200, [], [])
        assert (body["usage"]["prompt_tokens"], body["usage"]["prompt_tokens_details"]["image_tokens"]) == (22, 16)
        assert await rig.outcomes() == {"ok": 1}
        replica.refusing = (400, "too long")
        assert (await ask(rig, a_chat("hi", dry_run=True)))[0] == 400
        assert await rig.outcomes() == {"ok": 1, "refused": 1}


async def test_dry_runs_wait_in_turn_and_expire():
    replica = ChatReplica(counts={"prompt_tokens": 2, "text_tokens": 2, "image_tokens": [], "encoded_tokens": []})
    async with chatting(replica, pipeline=a_chat_pipeline(slo={"latency": "400ms"})) as rig:
        replica.count_gate.clear()
        statuses = [status for status, *_ in await asyncio.gather(*(ask(rig, a_chat(dry_run=True)) for _ in range(4)))]

        assert (statuses, replica.most_counting) == ([504] * 4, COUNTS_AT_ONCE)
        assert await rig.outcomes() == {"dropped": 4}
        replica.count_gate.set()
        assert (await ask(rig, a_chat(dry_run=True)))[0] == 200


async def test_the_first_piece_and_the_pace_are_what_is_promised():
    slo = {"latency": "60s", "timeToFirstToken": "30s", "timePerOutputToken": "1ms"}
    async with chatting(ChatReplica(pace_seconds=0.02), pipeline=a_chat_pipeline(slo=slo)) as rig:
        assert await tell(rig, a_chat("one"))
        assert await rig.outcomes() == {"ok": 1}
        assert await tell(rig, a_chat("one two three"))
        assert await rig.outcomes() == {"ok": 1, "late": 1}


async def test_v2_rows_are_generated_concurrently():
    replica = ChatReplica()
    async with chatting(replica) as rig:
        said = [json.dumps([{"role": "user", "content": [{"type": "text", "text": t}]}]).encode() for t in ("a b", "c")]
        messages = Tensor("messages", "BYTES", np.array(said, dtype=object))
        status, answer, _ = await rig.rest(InferRequest("sample", (messages,)))

        assert status == 200
        assert [list(output.array) for output in answer.outputs[:2]] == [[b"a b", b"c"], [b"stop", b"stop"]]
        assert answer.outputs[2].array.tolist() == [[10, 2, 0, 0, 10], [10, 1, 0, 0, 10]]


async def test_streams_through_envoy_are_unbuffered():
    replica = ChatReplica(stepped=True)
    async with chatting(replica) as rig:
        url = f"http://127.0.0.1:{(await rig.proxy()).rest_port}{CHAT}"
        replica.steps.release()
        async with rig.session.post(url, json=a_chat("one two three", stream=True)) as answer:
            while b"one" not in await answer.content.readuntil(b"\n\n"):
                pass
            assert replica.running == 1
        await rig.until(lambda: replica.running == 0)
        assert replica.written[0].ended == "left"

        for _ in range(3):
            replica.steps.release()
        large = a_chat("one two three", a_png(1200, 1200) + bytes(400_000), stream=True)
        async with rig.session.post(url, json=large) as answer:
            assert words_of(events(await answer.read())) == "one two three"
        assert rig.value("trimtab_ttft_seconds_count") == 2
        assert rig.value("trimtab_tbt_seconds_count") == 2
