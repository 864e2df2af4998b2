"""Tenant and deadline of chats: set by the router over every protocol, whatever the chat contains."""

import json

import grpc
import numpy as np
import pytest

from tests.builders import a_pipeline
from tests.router.chats import ChatReplica, a_chat_pipeline, a_writer
from tests.router.disaggregated import Encoder, a_picture, an_encoder, reading
from tests.router.fakes import a_rig, grpc_refusal
from tests.router.test_chats import chatting
from tests.router.test_queue import Caller
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.internal_wire import bytes_tensor
from trimtab_protocol.messages import TensorHeader
from trimtab_protocol.tensors import SLOW_VALUES_BYTES
from trimtab_router.admission.request_parsing import MAX_INLINE_ROWS, MAX_OPTIONS_BYTES, chat_inputs, is_slow_to_rewrite
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest
from trimtab_router.transport.http_transport import rows_with_deadline

SLO = {"latency": "60s", "timeToFirstToken": "5s"}
STOLEN = b'{"tenant": "b", "deadline_seconds": -1e9, "max_tokens": 1, "tenant": "c"}'
HELLO = b'[{"role": "user", "content": [{"type": "text", "text": "a b"}]}]'


def asked(
    *options: bytes, rows: int = 1, parameters: dict[str, int] | None = None, **tensors: list[bytes]
) -> InferRequest:
    given = {"messages": [HELLO] * rows} | ({"options": list(options)} if options else {})
    inputs = [Tensor(name, "BYTES", np.array(reply, dtype=object)) for name, reply in given.items()]
    inputs += [Tensor(name, "BYTES", np.array([reply], dtype=object)) for name, reply in tensors.items()]
    return InferRequest("sample", tuple(inputs), parameters=parameters or {})


def left_seconds(replica, chat):
    return replica.written[chat].options.pop("deadline_seconds")


async def test_options_carry_tenant_and_deadline():
    replica = ChatReplica()
    async with chatting(replica, pipeline=a_chat_pipeline(slo=SLO)) as rig:
        status, answer, _ = await rig.rest(asked(STOLEN, b'{"seed": 3}', rows=2), **{"x-trimtab-client": "a"})
        assert status == 200, answer
        assert (await rig.rest(asked(), **{"x-trimtab-client": "a"}))[0] == 200
        assert (await rig.rest(asked(STOLEN)))[0] == 200
        await rig.grpc(asked(STOLEN), metadata=(("x-trimtab-client", "b"),))
        code, _ = await grpc_refusal(rig.grpc(asked(b"[]")))

    assert all(0.0 < left_seconds(replica, chat) < 5.0 for chat in range(5))
    assert replica.written[4].options == {"max_tokens": 1, "tenant": "127.0.0.1/32"}
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    ours = {"tenant": "a"}
    sent = sorted((written.options for written in replica.written[:2]), key=lambda options: "seed" in options)
    assert sent == [{"max_tokens": 1} | ours, {"seed": 3} | ours]
    assert replica.written[2].options == ours
    assert replica.written[3].options == {"max_tokens": 1, "tenant": "127.0.0.1"}, "without Envoy, its address"
    assert [written.tenants for written in replica.written] == [["a"]] * 3 + [["127.0.0.1"], ["127.0.0.1/32"]]


MESSAGES_INPUT = {"name": "messages", "from": "request.inputs.messages"}


async def test_tenant_needs_no_options_input():
    replica = ChatReplica()
    async with chatting(replica, pipeline=a_chat_pipeline([a_writer(MESSAGES_INPUT)])) as rig:
        for client in ("victim", "thief"):
            assert (await rig.rest(asked(b'{"tenant": "victim"}'), **{"x-trimtab-client": client}))[0] == 200

    assert [written.tenants for written in replica.written] == [["victim"], ["thief"]]


async def test_images_need_no_options_input_for_their_tenant():
    encoder, references = an_encoder(), {"name": "references", "from": "encode.outputs.references", "optional": True}
    encoder["inputs"] = encoder["inputs"][:1]
    pipeline = a_chat_pipeline([encoder, a_writer(MESSAGES_INPUT, references)])
    images = Encoder(caches=True)
    async with a_rig(pipeline, {"encode": [images], "text": [ChatReplica(name="writer")]}) as rig:
        for client in ("victim", "thief", "victim"):
            reply = asked(b'{"tenant": "victim"}', images=[a_picture(1)])
            assert (await rig.rest(reply, **{"x-trimtab-client": client}))[0] == 200

    assert [seen.parameters["tenants"] for seen in images.seen] == ['["victim"]', '["thief"]']
    assert images.asked == [("victim", True)]


def test_queue_time_reduces_the_time_left():
    inputs = {"options": bytes_tensor([b'{"max_tokens": 1}', b"no JSON"]), "messages": bytes_tensor([HELLO] * 2)}
    piece = RowSlice(StageRequest(Caller(), "text", 2, inputs, deadline=107.0, now=100.0), 0, 2)
    at_once, later = (rows_with_deadline(departed_at, piece, "options") for departed_at in (100.0, 106.5))

    assert json.loads(at_once[0]) == {"max_tokens": 1, "deadline_seconds": 7.0}
    assert json.loads(later[0]) == {"max_tokens": 1, "deadline_seconds": 0.5}
    assert later[1] == b"no JSON"
    assert rows_with_deadline(106.5, piece, "messages").tolist() == [HELLO, HELLO]
    piece.request.set_prefill_seconds(4.0)  # seconds that its prompt takes to be read: so much sooner it must begin
    assert json.loads(rows_with_deadline(100.0, piece, "options")[0])["deadline_seconds"] == 3.0


async def test_options_rewritten_in_a_thread_carry_the_tenant():
    replica = ChatReplica()
    async with chatting(replica, pipeline=a_chat_pipeline(slo=SLO)) as rig:
        long = json.dumps([{"role": "user", "content": [{"type": "text", "text": "a" * SLOW_VALUES_BYTES}]}])
        inputs = [
            {"name": name, "datatype": "BYTES", "shape": [1], "data": [reply]}
            for name, reply in (("messages", long), ("options", '{"tenant": "b"}'))
        ]
        body = json.dumps({"inputs": inputs}).encode()
        assert (await rig.post("sample", body, **{"x-trimtab-client": "a"}))[0] == 200

    assert replica.written[0].options["tenant"] == "a"


def test_many_options_are_slow_to_rewrite():
    few, many, others = (
        TensorHeader(name, "BYTES", (rows,))
        for name, rows in (("options", MAX_INLINE_ROWS), ("options", MAX_INLINE_ROWS + 1), ("messages", 9999))
    )

    assert [is_slow_to_rewrite(("options",), [tensor]) for tensor in (few, many, others)] == [False, True, False]


@pytest.mark.parametrize("wrong", [b"[]", b"null", b"{", b"\xff", b"[" * 9999, b" " * MAX_OPTIONS_BYTES + b"{}"])
async def test_options_that_are_not_an_object_are_invalid(wrong):
    replica = ChatReplica()
    async with chatting(replica) as rig:
        status, why, _ = await rig.rest(asked(wrong))

        assert (status, "input 'options'" in why) == (400, True)
        assert not replica.written
        assert await rig.outcomes() == {"refused": 1}


async def test_naming_a_tenant_does_not_share_its_images():
    encoder, writer = Encoder(caches=True), ChatReplica(name="writer")
    async with reading([encoder], [writer]) as rig:
        for client in ("victim", "thief", "victim"):
            reply = asked(b'{"tenant": "victim"}', images=[a_picture(1)])
            assert (await rig.rest(reply, **{"x-trimtab-client": client}))[0] == 200

        assert encoder.files == [a_picture(1)] * 2
        assert encoder.asked == [("victim", True)]


def test_pipelines_that_answer_no_chats_have_no_options_to_own():
    assert chat_inputs(a_chat_pipeline().spec, "options") == ("options",)
    inputs = [{"name": "options", "datatype": "BYTES"}, {"name": "x", "datatype": "FP32", "shape": [4]}]
    assert chat_inputs(a_pipeline(inputs=inputs).spec, "options") == ()
