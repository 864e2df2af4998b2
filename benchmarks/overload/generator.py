"""Open-loop load generator on one core: `python -m benchmarks.overload.generator CORE` reads offers from its input.

Each line of input is an `Offer` as JSON; the response is its summary as JSON. The generator never waits for a response
before it sends the next request. A request without a connection waits, and its latency counts; a request that waits
longer than the SLO is abandoned, as a client would abandon it.
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
from typing import Literal

import numpy as np

from benchmarks.harness.processors import pin
from benchmarks.overload.connections import Connection, Http1Connection, Http2Connection, Http2Request, ResponseHeaders
from benchmarks.overload.outcomes import ABANDONED, OfferSummary, Outcomes, summarize
from trimtab_protocol import InferRequest, Tensor, rest
from trimtab_protocol.grpc_messages import method_path, request_to_message

Protocol = Literal["http1", "h2c", "grpc"]
MODEL, NUMBERS = "echo", 1024
LEAD_SECONDS = 0.3
"""Time between opening the connections and the first request."""
MAX_SENDS = 128
"""Requests sent before responses are read again."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A load: Poisson arrivals at a rate, over some connections."""

    protocol: Protocol
    port: int
    connections: int
    rate_rps: float
    seconds: float
    slo_seconds: float


def run_offer(offer: Offer) -> OfferSummary:
    draw = random.Random(0)  # noqa: S311 - arrivals, not secrets
    due: list[float] = []
    begin = at = time.monotonic() + LEAD_SECONDS
    while (at := at + draw.expovariate(offer.rate_rps)) < begin + offer.seconds:
        due.append(at)
    outcomes = Outcomes(due)
    with select.epoll() as poll:
        connect = _connector(offer, outcomes, poll)
        connections = [connect() for _ in range(offer.connections)]
        gc.disable()
        try:
            loop = _SendLoop(outcomes, connections, poll, offer.slo_seconds)
            loop.run(begin + offer.seconds + 2 * offer.slo_seconds)
        finally:
            gc.enable()
            for connection in connections:
                connection.close()
    return summarize(outcomes, offer.seconds, offer.slo_seconds)


class _SendLoop:
    """The connections, and the requests that are due and not sent."""

    def __init__(
        self, outcomes: Outcomes, connections: list[Connection], poll: "select.epoll", slo_seconds: float
    ) -> None:
        self._outcomes, self._poll, self._slo_seconds = outcomes, poll, slo_seconds
        self._connections = {connection.fileno(): connection for connection in connections}
        self._waiting: deque[int] = deque()
        self._free: deque[Connection] = deque()
        self._arrived = 0

    def run(self, end: float) -> None:
        """Send due requests and read responses until none is in flight, or until the end (monotonic seconds)."""
        due, count = self._outcomes.due, len(self._outcomes.due)
        while (now := time.monotonic()) < end:
            while self._arrived < count and due[self._arrived] <= now:
                self._waiting.append(self._arrived)
                self._arrived += 1
            self._send(now)
            if self._waiting and self._free:
                timeout_seconds = 0.0
            elif self._arrived < count:
                timeout_seconds = min(max(due[self._arrived] - now, 0.0), 0.1)
            elif self._waiting or self._outcomes.in_flight:
                timeout_seconds = 0.01
            else:
                break
            self._read(timeout_seconds)
        for index in (*self._waiting, *range(self._arrived, count)):
            self._outcomes.codes[index] = ABANDONED

    def _send(self, now: float) -> None:
        waiting, due = self._waiting, self._outcomes.due
        touched: set[Connection] = set()
        while waiting and now - due[waiting[0]] > self._slo_seconds:
            self._outcomes.codes[waiting.popleft()] = ABANDONED
        for _ in range(min(MAX_SENDS, len(waiting))):
            if not self._free:
                break
            connection = self._free.popleft()
            connection.listed = False
            if connection.has_capacity:
                connection.send(waiting.popleft(), now)
                touched.add(connection)
                self._list(connection)
        for connection in touched:
            connection.flush(now)

    def _read(self, timeout_seconds: float) -> None:
        events = self._poll.poll(timeout_seconds, 1024)
        now = time.monotonic()
        for number, mask in events:
            connection = self._connections[number]
            connection.on_event(mask, now)
            if connection.fileno() != number:  # it has reopened
                del self._connections[number]
                self._connections[connection.fileno()] = connection
            self._list(connection)

    def _list(self, connection: Connection) -> None:
        if not connection.listed and connection.has_capacity:
            connection.listed = True
            self._free.append(connection)


def _connector(offer: Offer, outcomes: Outcomes, poll: "select.epoll") -> Callable[[], Connection]:
    """Encode the request once and return a function that opens a connection."""
    x = np.arange(NUMBERS, dtype=np.float32).reshape(1, NUMBERS)
    path = f"/v2/models/{MODEL}/infer"
    if offer.protocol == "grpc":
        message = request_to_message(InferRequest(MODEL, (Tensor.of("x", x),))).SerializeToString()
        headers = {":path": method_path("ModelInfer"), "content-type": "application/grpc", "te": "trailers"}
        body = b"\0" + len(message).to_bytes(4, "big") + message
    else:
        request = InferRequest(MODEL, (Tensor.of("x", x),), parameters={"binary_data_output": True})
        buffers, header_length = rest.encode_request(request)
        body = b"".join(bytes(buffer) for buffer in buffers)
        headers = {rest.HEADER_LENGTH.lower(): str(header_length), "content-type": rest.BINARY_CONTENT_TYPE}
        headers["content-length"] = str(len(body))
    host = f"127.0.0.1:{offer.port}"
    if offer.protocol == "http1":
        lines = [f"POST {path} HTTP/1.1", f"host: {host}", *(f"{key}: {value}" for key, value in headers.items())]
        request_bytes = "\r\n".join([*lines, "", ""]).encode("ascii") + body
        return lambda: Http1Connection(offer.port, request_bytes, outcomes, poll)
    pseudo_headers = {":method": "POST", ":scheme": "http", ":authority": host, ":path": path}
    frames, decoder = Http2Request(list((pseudo_headers | headers).items()), body), ResponseHeaders()
    return lambda: Http2Connection(offer.port, frames, decoder, outcomes, poll)


def main() -> None:
    pin(int(sys.argv[1]))
    for line in sys.stdin:
        summary = run_offer(Offer(**json.loads(line)))
        sys.stdout.write(json.dumps(dataclasses.asdict(summary)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
