"""The hostile benchmark: frames as they go out, verdicts, phases, and callers against servers that misbehave."""

import asyncio
import io
import struct

import pytest
from hpack import Decoder

from benchmarks.hostile import frames
from benchmarks.hostile.caller import Caller, call_fields
from benchmarks.hostile.families import KINDS
from benchmarks.hostile.kinds import ENDED, Family, judge
from benchmarks.hostile.phases import CALM, Phase, Sample, by_kind, together
from benchmarks.hostile.wire import Wire, ask, connected, post, reply, status_of

SLO_SECONDS = 0.5


def test_kinds_have_names_of_their_own_and_are_enough():
    names = [kind.name for kind in KINDS]

    assert len(set(names)) == len(names) >= 55
    assert all(kind.right for kind in KINDS)


def test_a_frame_says_its_length_or_lies():
    assert frames.frame(frames.PING, frames.ACK, 0, b"12345678") == b"\0\0\x08\x06\x01\0\0\0\0" + b"12345678"
    assert frames.frame(frames.DATA, 0, 7, b"x", length=2**24 - 1)[:3] == b"\xff\xff\xff"
    assert frames.settings((4, 65_535)) == b"\0\0\x06\x04\0\0\0\0\0" + struct.pack(">HI", 4, 65_535)
    assert frames.message(b"abc", flag=1, length=9) == b"\1\0\0\0\x09abc"


@pytest.mark.parametrize("size", [0, 126, 127, 128, 300, 70_000])
def test_header_blocks_are_hpack_whatever_their_values(size):
    fields = [(b"x-a", b"a" * size), (b"x-b", b"a\r\nx-evil: 1\0\xff")]
    decoder = Decoder(max_header_list_size=2**20)

    assert decoder.decode(frames.block(fields), raw=True) == fields


def test_long_header_blocks_go_on_in_continuations():
    block = bytes(2 * frames.LARGEST_FRAME_BYTES + 1)
    received = bytearray(frames.headers(1, block, frames.END_HEADERS | frames.END_STREAM) + b"half a head")

    parsed = list(frames.parsed(received))
    assert [(kind, flags) for kind, flags, *_ in parsed] == [
        (frames.HEADERS, frames.END_STREAM),
        (frames.CONTINUATION, 0),
        (frames.CONTINUATION, frames.END_HEADERS),
    ]
    assert b"".join(payload for *_, payload in parsed) == block
    assert received == b"half a head"[: len(received)]


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        (["400", "cut"], ()),
        (["RST:CANCEL", "GOAWAY:ENHANCE_YOUR_CALM"], ()),
        (["400", "200", "200"], ("200",)),
        (["500: something"], ("500: something",)),
    ],
)
def test_a_code_is_right_by_its_name_or_by_its_kind(seen, wrong):
    verdict = judge(ENDED | {"400"}, seen)

    assert verdict.wrong == wrong
    assert verdict.holds == (not wrong)


def test_a_kind_that_met_nothing_does_not_hold():
    assert not judge(frozenset({"400"}), []).holds


async def test_a_family_keeps_what_is_declared():
    family = Family("some")

    @family.kind("knocks", {"400"})
    async def knock(door):
        return [door]

    (kind,) = family.kinds
    assert (kind.family, kind.name, list(await kind.act("400"))) == ("some", "knocks", ["400"])
    assert kind.right == {"400"}


def a_sample(at, seconds=0.01, *, stolen=0.0, busy=9.0, code="ok", wire="rest"):
    return Sample(wire, at, seconds, stolen, busy, code)


def test_friendly_requests_belong_to_the_phase_they_were_sent_in():
    phases = [Phase(CALM, 0.0, 1.0), Phase("flood", 1.0, 2.0), Phase(CALM, 2.0, 3.0)]
    samples = [a_sample(0.5), a_sample(1.99, 0.3), a_sample(1.5, code="429"), a_sample(2.0), a_sample(3.0)]

    seen = by_kind(samples, phases, SLO_SECONDS)

    assert (seen[CALM].sent, seen[CALM].not_ok) == (2, 0)
    assert (seen["flood"].sent, seen["flood"].not_ok, seen["flood"].quantile_seconds(0.99)) == (2, 1, 0.3)
    assert together(seen.values()).sent == 4


def test_what_the_machine_took_is_not_held_against_the_router():
    phase = [Phase("flood", 0.0, 9.0)]
    paused = a_sample(1.0, 0.7, stolen=0.6, busy=0.1, code="504")
    flooded = a_sample(1.0, 0.7, stolen=0.6, busy=0.3, code="504")
    refused = a_sample(1.0, 0.002, code="429")
    wrong = a_sample(1.0, 0.7, stolen=0.6, code="wrong")
    slow = a_sample(1.0, 0.7, stolen=0.1, busy=0.1, code="504")
    starved = Sample("rest", 1.0, 0.7, 0.1, 0.1, "504", all_waited_seconds=0.9)

    seen = by_kind([paused, flooded, refused, wrong, slow, starved], phase, SLO_SECONDS)["flood"]

    assert (seen.left_to_the_machine, seen.not_ok) == (2, 4)


def test_a_stop_counts_busy_time_with_its_core():
    phase = [Phase("flood", 0.0, 9.0)]
    probes = [a_sample(1.0, 0.8, stolen=0.5, wire="probe"), a_sample(2.0, 0.9, busy=0.2, wire="probe")]

    seen = by_kind(probes, phase, SLO_SECONDS)["flood"]

    assert seen.longest_stop_seconds == pytest.approx(0.3)
    assert seen.sent == 0


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1 429 Too Many", "429"),
        (b"\0\0\x06\x04\0\0\0\0\0", "h2"),
        (b"noise", repr(b"noise")),
        (b"", repr(b"")),
    ],
)
def test_a_status_is_read_from_whatever_came(head, status):
    assert status_of(head) == status


class Server:
    """A server that does as the test says with each connection."""

    def __init__(self, behave) -> None:
        self._behave = behave

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._behave, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_):
        self._server.close()
        await self._server.wait_closed()


async def test_an_answer_is_heard_while_the_body_is_still_being_sent():
    async def refuse(reader, writer):
        await reader.read(10)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    async with Server(refuse) as port:
        assert await ask(port, post("/", b"a"), ends=True) == "413"


async def test_a_connection_that_ends_without_a_word_was_cut():
    async def cut(reader, writer):
        await reader.read(10)
        writer.close()

    async with Server(cut) as port, connected(port) as wire:
        await wire.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await reply(wire) == "cut"


async def test_a_caller_tells_how_its_streams_and_its_connection_ended():
    answers = io.BytesIO()
    answers.write(frames.settings((frames.WINDOW_SETTING, 10)))
    answers.write(frames.headers(1, frames.block([(b":status", b"200"), (b"content-type", b"application/grpc")])))
    answers.write(frames.headers(1, frames.block([(b"grpc-status", b"8")]), frames.END_HEADERS | frames.END_STREAM))
    answers.write(frames.reset(3))
    answers.write(frames.headers(5, frames.block([(b":status", b"431")]), frames.END_HEADERS | frames.END_STREAM))
    answers.write(frames.frame(frames.GOAWAY, 0, 0, struct.pack(">II", 5, frames.ERRORS.index("ENHANCE_YOUR_CALM"))))

    async def speak(reader, writer):
        await reader.read(10)
        writer.write(answers.getvalue())
        writer.close()

    async with Server(speak) as port:
        caller = Caller(await Wire.open(port))
        await caller.send(frames.headers(1, frames.block(call_fields())))

        assert await caller.end() == "GOAWAY:ENHANCE_YOUR_CALM"
        assert caller.outcome == {1: "RESOURCE_EXHAUSTED", 3: "RST:CANCEL", 5: "431"}
        assert await caller.end_of(7) == "GOAWAY:ENHANCE_YOUR_CALM"
        caller.wire.close()


async def test_a_caller_sends_no_more_data_than_it_was_given_room_for():
    taken = bytearray()

    async def give_room(reader, writer):
        while len(taken) < 100_000:
            head = await reader.readexactly(frames.HEAD_BYTES)
            payload = await reader.readexactly(head[0] << 16 | head[1] << 8 | head[2])
            taken.extend(payload)
            if len(taken) == frames.FIRST_WINDOW_BYTES:
                writer.write(frames.window_update(0, 50_000) + frames.window_update(1, 50_000))
        writer.write(frames.reset(1, 0))
        writer.close()

    async with Server(give_room) as port:
        caller = Caller(await Wire.open(port))

        assert await caller.send_data(caller.stream(), bytes(100_000), ends=True)
        assert await caller.end_of(1) == "RST:NO_ERROR"
        assert len(taken) == 100_000
        caller.wire.close()
