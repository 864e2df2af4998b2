"""`python -m benchmarks.overload.generator`: an open loop that keeps to its schedule, from one core.

Reads orders from standard input, one line of JSON each, and answers each with its tally. Never waits for an
answer before it sends the next request: where no connection has room, a request waits, and its latency runs; who has
waited longer than the SLO gives up unsent, as a caller would.
"""

import dataclasses
import gc
import json
import random
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from benchmarks.cores import pin
from benchmarks.overload.board import GAVE_UP, Board, Tally, tally
from benchmarks.overload.http1 import Http1Connection
from benchmarks.overload.http2 import Answers, Http2Connection, Http2Request
from trimtab_protocol import InferRequest, Tensor, rest
from trimtab_protocol.grpc_messages import method_path, request_to_message

Speech = Literal["http1", "h2c", "grpc"]
LEAD_SECONDS = 0.3
"""From the opening of the connections to the first request."""
AT_ONCE = 128
"""Requests sent before answers are read again, where many are due."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to offer: so many requests a second, at random moments, over so many connections."""

    speech: Speech
    port: int
    connections: int
    rate_rps: float
    seconds: float
    slo_seconds: float
    numbers: int = 1024
    model: str = "echo"
    seed: int = 0


class Connection(Protocol):
    """What the loop asks of a connection."""

    listed: bool

    def fileno(self) -> int: ...
    @property
    def has_room(self) -> bool: ...
    def send(self, index: int, now: float) -> None: ...
    def flush(self, now: float) -> None: ...
    def on_event(self, mask: int, now: float) -> None: ...
    def close(self) -> None: ...


def offer(order: Order) -> Tally:
    """Offer what was ordered and sum up."""
    draw = random.Random(order.seed)  # noqa: S311 - arrivals, not secrets
    due: list[float] = []
    begin = at = time.monotonic() + LEAD_SECONDS
    while (at := at + draw.expovariate(order.rate_rps)) < begin + order.seconds:
        due.append(at)
    board = Board(due)
    with select.epoll() as poll:
        make = _connector(order, board, poll)
        connections = [make() for _ in range(order.connections)]
        gc.disable()
        try:
            _Loop(board, connections, poll, order.slo_seconds).run(begin + order.seconds + 2 * order.slo_seconds)
        finally:
            gc.enable()
            for connection in connections:
                connection.close()
    return tally(board, order.seconds, order.slo_seconds)


class _Loop:
    """The connections, and the requests that are due but could not be sent yet."""

    def __init__(self, board: Board, connections: list[Connection], poll: "select.epoll", slo_seconds: float) -> None:
        self._board, self._poll, self._patience_seconds = board, poll, slo_seconds
        self._known = {connection.fileno(): connection for connection in connections}
        self._waiting: deque[int] = deque()
        self._free: deque[Connection] = deque()
        self._arrived = 0

    def run(self, end: float) -> None:
        """Send what is due and read what comes until nothing is under way, or the end (monotonic seconds)."""
        due, count = self._board.due, len(self._board.due)
        while (now := time.monotonic()) < end:
            while self._arrived < count and due[self._arrived] <= now:
                self._waiting.append(self._arrived)
                self._arrived += 1
            self._send(now)
            if self._waiting and self._free:
                pause = 0.0
            elif self._arrived < count:
                pause = min(max(due[self._arrived] - now, 0.0), 0.1)
            elif self._waiting or self._board.under_way:
                pause = 0.01
            else:
                break
            self._read(pause)
        for index in (*self._waiting, *range(self._arrived, count)):
            self._board.codes[index] = GAVE_UP

    def _send(self, now: float) -> None:
        waiting, due = self._waiting, self._board.due
        touched: set[Connection] = set()
        while waiting and now - due[waiting[0]] > self._patience_seconds:
            self._board.codes[waiting.popleft()] = GAVE_UP
        for _ in range(min(AT_ONCE, len(waiting))):
            if not self._free:
                break
            connection = self._free.popleft()
            connection.listed = False
            if connection.has_room:
                connection.send(waiting.popleft(), now)
                touched.add(connection)
                self._list(connection)
        for connection in touched:
            connection.flush(now)

    def _read(self, pause_seconds: float) -> None:
        events = self._poll.poll(pause_seconds, 1024)
        now = time.monotonic()
        for number, mask in events:
            connection = self._known[number]
            connection.on_event(mask, now)
            if connection.fileno() != number:  # it has opened itself anew
                del self._known[number]
                self._known[connection.fileno()] = connection
            self._list(connection)

    def _list(self, connection: Connection) -> None:
        if not connection.listed and connection.has_room:
            connection.listed = True
            self._free.append(connection)


def _connector(order: Order, board: Board, poll: "select.epoll") -> Callable[[], Connection]:
    """Prepare the request once, whatever speech; return what opens a connection."""
    x = np.arange(order.numbers, dtype=np.float32).reshape(1, order.numbers)
    request = InferRequest(order.model, (Tensor.of("x", x),), parameters={"binary_data_output": True})
    path = f"/v2/models/{order.model}/infer"
    if order.speech == "grpc":
        message = request_to_message(InferRequest(order.model, (Tensor.of("x", x),))).SerializeToString()
        headers = {":path": method_path("ModelInfer"), "content-type": "application/grpc", "te": "trailers"}
        framed = b"\0" + len(message).to_bytes(4, "big") + message
        return _h2_connector(order, headers, framed, board, poll)
    buffers, header_length = rest.encode_request(request)
    body = b"".join(bytes(buffer) for buffer in buffers)
    headers = {rest.HEADER_LENGTH.lower(): str(header_length), "content-type": rest.BINARY_CONTENT_TYPE}
    if order.speech == "h2c":
        headers = {":path": path, **headers, "content-length": str(len(body))}
        return _h2_connector(order, headers, body, board, poll)
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: 127.0.0.1:{order.port}",
        *(f"{key}: {value}" for key, value in headers.items()),
    ]
    wire = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("ascii") + body
    return lambda: Http1Connection(order.port, wire, board, poll)


def _h2_connector(
    order: Order, headers: dict[str, str], body: bytes, board: Board, poll: "select.epoll"
) -> Callable[[], Connection]:
    pseudo = [(":method", "POST"), (":scheme", "http"), (":authority", f"127.0.0.1:{order.port}")]
    request, answers = Http2Request([*pseudo, *headers.items()], body), Answers()
    return lambda: Http2Connection(order.port, request, answers, board, poll)


def main() -> None:
    """Carry out one order after the other, on the core that it is told: it may be started by one who is pinned."""
    pin(int(sys.argv[1]))
    for line in sys.stdin:
        done = offer(Order(**json.loads(line)))
        sys.stdout.write(json.dumps(dataclasses.asdict(done)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
