"""Whose a chat is, and how urgent, is the router's to say at each door, whatever the chat says itself."""

import json
import threading

import grpc
import numpy as np
import pytest

from tests.builders import a_pipeline
from tests.router.chats import ChatReplica, a_chat_pipeline
from tests.router.parted import Encoder, a_picture, reading
from tests.router.test_chats import chatting
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.tensors import SLOW_VALUES_BYTES
from trimtab_router.admission.owning import MOST_OPTIONS_BYTES, MOST_ROWS_AT_ONCE, options_inputs, owned

SLO = {"latency": "60s", "firstToken": "5s"}
STOLEN = b'{"tenant": "b", "urgency_seconds": -1e9, "max_tokens": 1, "tenant": "c"}'
HELLO = b'[{"role": "user", "content": [{"type": "text", "text": "a b"}]}]'


def asked(*options: bytes, rows: int = 1, **tensors: list[bytes]) -> InferRequest:
    given = {"messages": [HELLO] * rows} | ({"options": list(options)} if options else {})
    inputs = [Tensor(name, "BYTES", np.array(told, dtype=object)) for name, told in given.items()]
    inputs += [Tensor(name, "BYTES", np.array([told], dtype=object)) for name, told in tensors.items()]
    return InferRequest("sample", tuple(inputs))


async def test_over_rest_options_say_who_calls_and_what_is_promised():
    replica = ChatReplica()
    async with chatting(replica, pipeline=a_chat_pipeline(slo=SLO)) as rig:
        status, answer, _ = await rig.rest(asked(STOLEN, b'{"seed": 3}', rows=2), **{"x-trimtab-client": "a"})
        assert status == 200, answer
        assert (await rig.rest(asked(), **{"x-trimtab-client": "a"}))[0] == 200
        assert (await rig.rest(asked(STOLEN)))[0] == 200

    ours = {"tenant": "a", "urgency_seconds": 5.0}
    sent = sorted((written.options for written in replica.written[:2]), key=lambda options: "seed" in options)
    assert sent == [{"max_tokens": 1} | ours, {"seed": 3} | ours]
    assert replica.written[2].options == ours
    assert replica.written[3].options == {"max_tokens": 1, "urgency_seconds": 5.0}


async def test_over_grpc_too():
    replica = ChatReplica()
    async with chatting(replica, pipeline=a_chat_pipeline(slo=SLO)) as rig:
        await rig.grpc(asked(STOLEN), metadata=(("x-trimtab-client", "b"),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.grpc(asked(b"[]"))

    assert replica.written[0].options == {"max_tokens": 1, "tenant": "127.0.0.1", "urgency_seconds": 5.0}
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(replica.written) == 1


async def test_what_is_long_enough_to_be_read_by_a_thread_is_no_less_its_callers():
    replica = ChatReplica()
    async with chatting(replica, pipeline=a_chat_pipeline(slo=SLO)) as rig:
        long = json.dumps([{"role": "user", "content": [{"type": "text", "text": "a" * SLOW_VALUES_BYTES}]}])
        inputs = [
            {"name": name, "datatype": "BYTES", "shape": [1], "data": [told]}
            for name, told in (("messages", long), ("options", '{"tenant": "b"}'))
        ]
        body = json.dumps({"inputs": inputs}).encode()
        assert (await rig.post("sample", body, **{"x-trimtab-client": "a"}))[0] == 200

    assert replica.written[0].options["tenant"] == "a"


async def test_many_options_are_read_beside_the_loop(monkeypatch):
    threads: list[int] = []

    def noted(*given, **told):
        threads.append(threading.get_ident())
        return owned(*given, **told)

    monkeypatch.setattr("trimtab_router.router.owned", noted)
    many = MOST_ROWS_AT_ONCE + 1
    async with chatting(ChatReplica(), pipeline=a_chat_pipeline(slo=SLO)) as rig:
        await rig.rest(asked(b"{}"))
        await rig.rest(asked(*(b'{"seed": %d}' % row for row in range(many)), rows=many))

    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()


@pytest.mark.parametrize("wrong", [b"[]", b"null", b"{", b"\xff", b"[" * 9999, b" " * MOST_OPTIONS_BYTES + b"{}"])
async def test_options_that_are_no_object_are_the_callers_mistake(wrong):
    replica = ChatReplica()
    async with chatting(replica) as rig:
        status, why, _ = await rig.rest(asked(wrong))

        assert (status, "input 'options'" in why) == (400, True)
        assert not replica.written
        assert await rig.outcomes() == {"refused": 1}


async def test_an_image_is_shared_with_nobody_that_only_names_its_owner():
    encoder, writer = Encoder(caches=True), ChatReplica(name="writer")
    async with reading([encoder], [writer]) as rig:
        for client in ("victim", "thief", "victim"):
            told = asked(b'{"tenant": "victim"}', images=[a_picture(1)])
            assert (await rig.rest(told, **{"x-trimtab-client": client}))[0] == 200

        assert encoder.files == [a_picture(1)] * 2
        assert encoder.asked == [("victim", True)]


def test_pipelines_that_answer_no_chats_have_no_options_to_own():
    assert options_inputs(a_chat_pipeline().spec) == ("options",)
    plain = a_pipeline(
        inputs=[{"name": "options", "datatype": "BYTES"}, {"name": "x", "datatype": "FP32", "shape": [4]}]
    )
    assert options_inputs(plain.spec) == ()
