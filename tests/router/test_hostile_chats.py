"""Hostile chats: refused with a code, within little memory and time."""

import asyncio
import contextlib
import io
import json
import time
import tracemalloc

import pytest

from tests.router.chats import ChatReplica, a_chat, a_chat_pipeline, a_png, data_url
from tests.router.fakes import a_rig
from tests.security.attacks import MEBIBYTE, READ, SPELLED, Ground
from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.chat_parser import decode_images, parse_chat
from trimtab_protocol.errors import InvalidChat

CHAT = "/v1/chat/completions"


ATTACKS = {attack.name: attack for attack in READ}


@pytest.mark.parametrize("name", ATTACKS)
async def test_hostile_requests_need_little_memory(name):
    attack = ATTACKS[name]
    body = attack.body(Ground("sample"))
    replica = ChatReplica()
    async with a_rig(a_chat_pipeline(), {"text": [replica]}) as rig:
        await post(rig, json.dumps(a_chat()).encode())  # what is made once is made
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            status, reply = await post(rig, body)
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

        assert (status, reply["error"]["code"]) == (attack.status, attack.code), reply
        assert peak < 64 * MEBIBYTE, "client and server together"
        assert len(replica.written) == 1
        assert rig.value("trimtab_bytes_in_flight") == 0
        assert (await post(rig, json.dumps(a_chat()).encode()))[0] == 200


async def post(rig, body):
    async with rig.session.post(
        rig.url + CHAT, data=io.BytesIO(body), headers={"Content-Type": "application/json"}
    ) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_requests_take_little_time(name):
    """Of the loop that serves all others; images are decode_images one at a time, with others between."""
    body = ATTACKS[name].body(Ground("sample"))
    spent = []
    for _ in range(3):
        began = time.process_time()
        with contextlib.suppress(InvalidChat):
            list(decode_images(parse_chat(memoryview(body), MEBIBYTE, ImageLimits()), ImageLimits()))
        spent.append(time.process_time() - began)
    assert min(spent) < 0.05


@pytest.mark.parametrize("fronted", [False, True])
async def test_a_gigabyte_is_refused_before_it_is_sent(fronted):
    async with a_rig(a_chat_pipeline(), {"text": [ChatReplica()]}) as rig:
        port = (await rig.proxy()).rest_port if fronted else rig.listeners.rest_port
        head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {10**9}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(2**16), 5)
        writer.close()

        assert b" 413 " in answer.split(b"\r\n")[0]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


async def test_spelled_placeholders_stay_text():
    replica = ChatReplica()
    async with a_rig(a_chat_pipeline(), {"text": [replica]}) as rig:
        status, reply = await post(rig, json.dumps(a_chat(SPELLED, a_png())).encode())

        assert (status, reply["choices"][0]["message"]["content"]) == (200, SPELLED)
        assert replica.written[0].messages[0]["content"] == [{"type": "text", "text": SPELLED}, {"type": "image"}]
        assert len(replica.written[0].images) == 1
        assert data_url(a_png()) not in json.dumps(replica.written[0].messages)
