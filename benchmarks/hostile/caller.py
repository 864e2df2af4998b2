"""An HTTP/2 caller over a `Wire`: sends frames as told, and notes what became of each stream."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from hpack import Decoder
from hpack.exceptions import HPACKError

from benchmarks.hostile import frames
from benchmarks.hostile.kinds import CUT, GOAWAY, KEPT, NOTHING, RST
from benchmarks.hostile.wire import PATIENCE_SECONDS, Wire

STATUS_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}
INFER_PATH = b"/inference.GRPCInferenceService/ModelInfer"
SLOWEST_BYTES_PER_SECOND = 2 * 2**20
"""A large body may take a slow machine so long."""
ROOM = (frames.WINDOW_SETTING, 2**31 - 1)
LIVE_PATH = b"/inference.GRPCInferenceService/ServerLive"


def call_fields(
    path: bytes = INFER_PATH, *more: tuple[bytes, bytes], kind: bytes = b"application/grpc"
) -> list[tuple[bytes, bytes]]:
    """The header fields of a gRPC call."""
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"127.0.0.1")]
    return [*pseudo, (b"content-type", kind), (b"te", b"trailers"), *more]


class Caller:
    """One connection; `outcome` holds how each stream ended, `goaway` how the connection did."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.outcome: dict[int, str] = {}
        self.goaway: str | None = None
        self.pongs = 0
        self.data_bytes = 0
        self._statuses: dict[int, str] = {}
        self._decoder = Decoder()
        self._first_window = frames.FIRST_WINDOW_BYTES
        self._window = frames.FIRST_WINDOW_BYTES
        self._windows: dict[int, int] = {}
        self._next = -1

    def stream(self) -> int:
        """The next stream's number."""
        self._next += 2
        return self._next

    async def send(self, *sent: bytes) -> bool:
        """Send frames; False once the connection has ended."""
        self._read()
        return await self.wire.send(b"".join(sent))

    async def call(self, body: bytes, fields: frames.Fields | None = None) -> str:
        """Make one call with a body of any size, keeping to the windows; return how it ended."""
        number = self.stream()
        await self.send(frames.headers(number, frames.block(call_fields() if fields is None else fields)))
        await self.send_data(number, body, ends=True)
        return await self.end_of(number, PATIENCE_SECONDS + len(body) / SLOWEST_BYTES_PER_SECOND)

    async def send_data(self, number: int, body: bytes, *, ends: bool = False) -> bool:
        """Send DATA as fast as the windows let; False where the stream or connection ended before, or no room came."""
        view, at = memoryview(body), 0
        while True:
            piece = bytes(view[at : at + min(self._room(number), frames.LARGEST_FRAME_BYTES)])
            at += len(piece)
            last = at == len(body)
            if piece or last:
                flags = frames.END_STREAM if last and ends else 0
                self._spend(number, len(piece))
                if not await self.send(frames.frame(frames.DATA, flags, number, piece)):
                    return False
            if last:
                return True
            room = await self.wire.until(lambda: self._over(number) or self._room(number) > 0)
            if not room or self._over(number):
                return False

    async def end_of(self, number: int, patience_seconds: float = PATIENCE_SECONDS) -> str:
        """Wait for the end of a stream: a gRPC or HTTP code, `RST:CODE`, `GOAWAY:CODE`, `cut` or `nothing`."""
        await self.wire.until(lambda: self._over(number), patience_seconds)
        return self.outcome.get(number) or self.goaway or (CUT if self.wire.closed else NOTHING)

    async def end(self, patience_seconds: float = PATIENCE_SECONDS) -> str:
        """Wait for the end of the connection; `kept` where a PING is still answered."""
        before = self.pongs
        await self.send(frames.frame(frames.PING, 0, 0, b"are you?"))

        def told() -> bool:
            self._read()
            return self.goaway is not None or self.pongs > before

        await self.wire.until(told, patience_seconds)
        if self.goaway is not None or self.wire.closed:
            return self.goaway or CUT
        return KEPT if self.pongs > before else NOTHING

    def _over(self, number: int) -> bool:
        self._read()
        return number in self.outcome or self.goaway is not None

    def _room(self, number: int) -> int:
        return max(min(self._window, self._windows.get(number, self._first_window)), 0)

    def _spend(self, number: int, size: int) -> None:
        self._window -= size
        self._windows[number] = self._windows.get(number, self._first_window) - size

    def _read(self) -> None:
        for kind, flags, number, payload in frames.parsed(self.wire.received):
            self._take(kind, flags, number, payload)

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        match kind:
            case frames.GOAWAY:
                self.goaway = f"{GOAWAY}:{frames.error_name(int.from_bytes(payload[4:8], 'big'))}"
            case frames.RST_STREAM:
                self.outcome.setdefault(number, f"{RST}:{frames.error_name(int.from_bytes(payload, 'big'))}")
            case frames.SETTINGS if not flags & frames.ACK:
                self._take_settings(payload)
            case frames.WINDOW_UPDATE:
                self._take_room(number, int.from_bytes(payload, "big"))
            case frames.PING if flags & frames.ACK:
                self.pongs += 1
            case frames.HEADERS:
                self._take_headers(number, payload)
            case frames.DATA:
                self.data_bytes += len(payload)
        if kind in {frames.HEADERS, frames.DATA} and flags & frames.END_STREAM:
            self.outcome.setdefault(number, self._statuses.get(number, NOTHING))

    def _take_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            if int.from_bytes(payload[at : at + 2], "big") == frames.WINDOW_SETTING:
                given = int.from_bytes(payload[at + 2 : at + 6], "big")
                self._windows = {number: room + given - self._first_window for number, room in self._windows.items()}
                self._first_window = given

    def _take_room(self, number: int, increment: int) -> None:
        if number:
            self._windows[number] = self._windows.get(number, self._first_window) + increment
        else:
            self._window += increment

    def _take_headers(self, number: int, payload: bytes) -> None:
        try:
            fields = dict(self._decoder.decode(payload, raw=True))
        except HPACKError:
            return
        if (status := fields.get(b"grpc-status")) is not None:
            self._statuses[number] = STATUS_NAMES.get(int(status), status.decode("latin-1"))
        elif number not in self._statuses or self._statuses[number] == "200":
            self._statuses[number] = fields.get(b":status", b"no status").decode("latin-1")


@asynccontextmanager
async def calling(port: int, *settings: tuple[int, int]) -> AsyncIterator[Caller]:
    """A caller that has said hello, closed afterwards; without settings it takes answers of any size."""
    wire = await Wire.open(port)
    try:
        caller = Caller(wire)
        room = frames.window_update(0, 2**31 - 1 - frames.FIRST_WINDOW_BYTES)
        await caller.send(frames.PREFACE, frames.settings(*(settings or (ROOM,))), b"" if settings else room)
        await caller.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
        yield caller
    finally:
        wire.close()
