"""gRPC's HTTP/2: frame by frame where callers may be strange, and through grpc's own client where they are not."""

import asyncio
import struct

import grpc
import numpy as np
import pytest
from hpack import Decoder, Encoder
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig
from trimtab_protocol import InferRequest, Tensor, grpc_messages
from trimtab_router.ingress import frames, http2

PATH = grpc_messages.method_path("ModelInfer")
HEAD = frames.FRAME_HEAD


def message(request: InferRequest) -> bytes:
    body: bytes = grpc_messages.request_to_message(request).SerializeToString()
    return b"\0" + len(body).to_bytes(4, "big") + body


class RawClient:
    """A caller that sends frames as the test wants them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = Encoder(), Decoder()

    @classmethod
    async def connect(cls, rig, settings: bytes = b"", preface: bytes = frames.PREFACE) -> "RawClient":
        client = cls(*await asyncio.open_connection("127.0.0.1", rig.doors.grpc_port))
        client.writer.write(preface + frames.frame(frames.SETTINGS, 0, 0, settings))
        return client

    def headers(self, path: str = PATH, **more: str) -> bytes:
        fields = {":method": "POST", ":scheme": "http", ":path": path, "content-type": "application/grpc", **more}
        return self.encoder.encode(list(fields.items()))

    def call(self, stream: int, body: bytes, **headers: str) -> None:
        self.writer.write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, self.headers(**headers)))
        self.writer.write(frames.frame(frames.DATA, frames.END_STREAM, stream, body))

    async def next_frame(self, *kinds: int) -> tuple[int, int, int, bytes]:
        """The next frame of one of these kinds."""
        while True:
            high, low, kind, flags, stream = HEAD.unpack(await self.reader.readexactly(9))
            payload = await self.reader.readexactly(high << 8 | low)
            if kind in kinds:
                return kind, flags, stream, payload

    async def answer(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """The data and trailers of a stream."""
        data = b""
        fields: dict[str, str] = {}
        while True:
            kind, flags, number, payload = await self.next_frame(frames.DATA, frames.HEADERS)
            if kind == frames.HEADERS:
                fields |= {str(name): str(value) for name, value in self.decoder.decode(payload)}
            elif number == stream:
                data += payload
            if flags & frames.END_STREAM and number == stream:
                return data, fields

    async def ended(self) -> int:
        """The code of the GOAWAY that ends the connection."""
        *_, payload = await self.next_frame(frames.GOAWAY)
        assert await self.reader.read() == b""
        self.close()
        return int.from_bytes(payload[4:8], "big")

    def close(self) -> None:
        self.writer.close()


def result(data: bytes):
    assert int.from_bytes(data[1:5], "big") == len(data) - 5
    return grpc_messages.response_from_message(grpc_messages.response_class("ModelInfer").FromString(data[5:]))


@pytest.fixture
async def rig():
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        yield rig


@pytest.fixture
async def client(rig):
    client = await RawClient.connect(rig)
    yield client
    client.close()


async def test_calls_on_one_connection_are_answered_each_on_its_stream(client):
    for stream in (1, 3, 5):
        client.call(stream, message(a_request(value=float(stream))))
        data, fields = await client.answer(stream)

        assert result(data).outputs[0].array[0, 0] == stream + 1
        assert (fields[":status"], fields["content-type"], fields["grpc-status"]) == ("200", "application/grpc", "0")


async def test_headers_and_data_may_come_in_any_pieces(client):
    block, body = client.headers(), message(a_request())
    client.writer.write(
        frames.frame(frames.HEADERS, frames.PADDED | frames.WITH_PRIORITY, 1, b"\x02" + bytes(5) + block[:9] + bytes(2))
    )
    client.writer.write(frames.frame(frames.CONTINUATION, 0, 1, block[9:20]))
    client.writer.write(frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:]))
    client.writer.write(frames.frame(frames.PRIORITY, 0, 1, bytes(5)))
    client.writer.write(frames.frame(frames.DATA, frames.PADDED, 1, b"\x03" + body[:3] + bytes(3)))
    for at in range(3, len(body)):
        client.writer.write(frames.frame(frames.DATA, 0, 1, body[at : at + 1]))
    client.writer.write(frames.frame(frames.DATA, frames.END_STREAM, 1, b""))

    data, fields = await client.answer(1)
    assert (fields["grpc-status"], len(result(data).outputs)) == ("0", 1)


async def test_answers_keep_to_the_callers_window(rig):
    client = await RawClient.connect(rig, struct.pack(">HI", frames.SETTING_WINDOW, 10))
    client.call(1, message(a_request()))
    *_, first = await client.next_frame(frames.DATA)
    assert len(first) == 10

    client.writer.write(frames.frame(frames.WINDOW_UPDATE, 0, 1, (7).to_bytes(4, "big")))
    *_, second = await client.next_frame(frames.DATA)
    assert len(second) == 7

    client.writer.write(frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HI", frames.SETTING_WINDOW, 100_000)))
    rest, fields = await client.answer(1)
    assert result(first + second + rest).outputs[0].array[0, 0] == 1
    assert fields["grpc-status"] == "0"
    client.close()


async def test_a_message_too_large_is_refused_before_it_is_sent(rig, client):
    client.writer.write(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, client.headers()))
    client.writer.write(frames.frame(frames.DATA, 0, 1, b"\0" + (2**30).to_bytes(4, "big") + b"the first bytes"))

    _, fields = await client.answer(1)
    assert (fields["grpc-status"], fields["x-trimtab-reason"]) == ("8", "PayloadTooLarge")
    assert fields["grpc-message"] == "the message has 1073741824 bytes; at most 67108864 bytes are taken"
    assert (await client.next_frame(frames.RST_STREAM))[3] == bytes(4)
    assert await rig.outcomes() == {"refused": 1}


async def test_pings_are_answered(client):
    client.writer.write(frames.frame(frames.PING, 0, 0, b"12345678"))

    assert await client.next_frame(frames.PING) == (frames.PING, frames.ACK, 0, b"12345678")


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"", {}, "3", "a unary call carries exactly one message"),
        (message(a_request()) * 2, {}, "3", "a unary call carries exactly one message"),
        (
            message(a_request()),
            {"grpc-timeout": "soon"},
            "3",
            "grpc-timeout is 'soon'; it must be up to 8 digits and one of",
        ),
        (message(a_request()), {"path": "/some/Method"}, "12", "no method /some/Method"),
        (b"\1" + message(a_request())[1:], {}, "3", "grpc-encoding is ''; use identity, gzip or deflate"),
        (b"\1" + message(a_request())[1:], {"grpc-encoding": "gzip"}, "3", "the message is not gzip"),
    ],
)
async def test_bad_calls_get_a_status_and_harm_nobody(client, body, headers, status, words):
    client.call(1, body, **headers)
    _, fields = await client.answer(1)
    assert fields["grpc-status"] == status
    assert words in fields["grpc-message"]

    client.call(3, message(a_request()))
    assert (await client.answer(3))[1]["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frames.frame(frames.DATA, 0, 7, b"x"), frames.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, frames.END_HEADERS, 2, b"\x82"), frames.PROTOCOL_ERROR),
        (
            frames.frame(frames.HEADERS, 0, 1, b"\x82") + frames.frame(frames.PING, 0, 0, bytes(8)),
            frames.PROTOCOL_ERROR,
        ),
        (frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff"), frames.COMPRESSION_ERROR),
        (frames.frame(frames.CONTINUATION, 0, 1, b""), frames.PROTOCOL_ERROR),
        (frames.frame(frames.PUSH_PROMISE, 0, 1, b""), frames.PROTOCOL_ERROR),
        (frames.frame(frames.PING, 0, 0, b"short"), frames.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, 0, 0, b"short"), frames.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31)), frames.FLOW_CONTROL_ERROR),
        (frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 5, 1)), frames.PROTOCOL_ERROR),
        (frames.frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)), frames.FLOW_CONTROL_ERROR),
        (frames.frame(frames.WINDOW_UPDATE, 0, 0, (2**31 - 1).to_bytes(4, "big")), frames.FLOW_CONTROL_ERROR),
        (frames.frame(frames.RST_STREAM, 0, 9, bytes(4)), frames.PROTOCOL_ERROR),
        (HEAD.pack(0xFFFF, 0xFF, frames.DATA, 0, 1), frames.FRAME_SIZE_ERROR),
        (
            frames.frame(frames.HEADERS, 0, 1, bytes(60_000)) + frames.frame(frames.CONTINUATION, 0, 1, bytes(60_000)),
            frames.ENHANCE_YOUR_CALM,
        ),
    ],
)
async def test_what_breaks_http2_ends_the_connection_with_its_code(client, sent, code):
    client.writer.write(sent)

    assert await client.ended() == code


async def test_other_protocols_are_turned_away(rig):
    client = await RawClient.connect(rig, preface=b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")

    assert await client.ended() == frames.PROTOCOL_ERROR


async def test_one_who_begins_and_cancels_without_end_is_sent_away(rig):
    client = await RawClient.connect(rig)
    begin = frames.frame(frames.HEADERS, frames.END_HEADERS, 0, client.headers())[9:]
    for number in range(http2.MAX_RESETS + 1):
        stream = 2 * number + 1
        client.writer.write(
            frames.frame(frames.HEADERS, frames.END_HEADERS, stream, begin if not number else client.headers())
        )
        client.writer.write(frames.frame(frames.RST_STREAM, 0, stream, bytes(4)))

    assert await client.ended() == frames.ENHANCE_YOUR_CALM


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40)), max_size=8)
)
@example([(1, 4, 1, b""), (0, 0, 1, bytes(4) + b"\x09")])
def test_no_frames_do_harm(strange_frames):
    asyncio.run(_no_frames_do_harm(strange_frames))


async def _no_frames_do_harm(strange_frames):
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        strange = await RawClient.connect(rig)
        for kind, flags, stream, payload in strange_frames:
            strange.writer.write(frames.frame(kind, flags, stream, payload))
        await strange.writer.drain()
        assert (await rig.grpc(a_request())).outputs[0].array[0, 0] == 1
        strange.close()
        await rig.until(lambda: not rig.router.state()["stages"]["stage-0"]["queue_rows"])
        await rig.until(lambda: rig.value("trimtab_bytes_in_flight") == 0)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_read(rig, compression):
    call = rig.channel.unary_unary(PATH, None, None)
    body = grpc_messages.request_to_message(a_request(rows=100, value=2.0)).SerializeToString()

    answer = grpc_messages.response_class("ModelInfer").FromString(await call(body, compression=compression))
    assert grpc_messages.response_from_message(answer).outputs[0].array.tolist() == [[3.0] * 4] * 100


async def test_large_tensors_pass_grpcs_flow_control_both_ways():
    rows = 500
    wide = {"name": "x", "datatype": "FP32", "shape": [4000]}
    stage = a_pipeline(1).spec.stages[0].model_dump(mode="json", by_alias=True)
    stage["outputs"] = [{**wide, "name": "y"}]
    pipeline = a_pipeline([stage], inputs=[wide])
    x = np.random.default_rng(0).random((rows, 4000), np.float32)
    async with a_rig(pipeline, {"stage-0": [FakeReplica()]}, batchSize=64) as rig:
        options = [("grpc.max_receive_message_length", 2**26)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.doors.grpc_port}", options=options) as channel:
            request = InferRequest("sample", (Tensor.of("x", x),), parameters={"timeout": 60_000_000})
            body = grpc_messages.request_to_message(request).SerializeToString()
            answers = await asyncio.gather(*(channel.unary_unary(PATH, None, None)(body) for _ in range(2)))

    for answer in answers:
        decoded = grpc_messages.response_class("ModelInfer").FromString(answer)
        np.testing.assert_array_equal(grpc_messages.response_from_message(decoded).outputs[0].array, x + 1)
