"""Adjustments of MLServer: a bound of request bodies as on the data port, logging, and reserved ports."""

import json
import logging
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Self

from trimtab_model_servers.errors import ModelError
from trimtab_pipelines.model_spec import MAX_BODY_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
_SERVER_ERROR = 500


class BodyLimit:
    """Answers 413 to oversized bodies: by Content-Length before reading, else once the limit is exceeded."""

    def __init__(self, app: App, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _declared_bytes(scope) > self._max_bytes:
            await self._reject(send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        received = 0
        rejected = False

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                return {"type": "http.disconnect"}  # ends the read; its response is discarded
            return message

        async def send_within_limit(message: Message) -> None:
            nonlocal rejected
            if received <= self._max_bytes:
                await send(message)
            elif not rejected:
                rejected = True
                await self._reject(send)

        try:
            await self._app(scope, receive_counted, send_within_limit)
        except Exception:
            if received <= self._max_bytes:
                raise
        if received > self._max_bytes and not rejected:
            await self._reject(send)

    async def _reject(self, send: Send) -> None:
        body = json.dumps({"error": f"the body is too large; send at most {self._max_bytes} bytes"}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _declared_bytes(scope: MutableMapping[str, Any]) -> int:
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length) if length.isdigit() else 0


class ReservedPort:
    """A free or given port, reserved until a server has bound it too.

    MLServer accepts port numbers, not sockets, and does not report which port it got for 0. A socket bound without
    options gets an exclusive port; with reuse enabled afterwards, and never listening, it lets a server bind that port.
    """

    def __init__(self, address: str, number: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        if number:  # connections of the previous process may linger
            self._share()
        self._socket.bind((address, number))
        self._share()
        self.number: int = self._socket.getsockname()[1]

    def _share(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


class NotReportedElsewhere(logging.Filter):
    """Drops records of exceptions that are reported elsewhere.

    MLServer logs the stack trace of each rejected request, which the client receives, and of a model that cannot be
    loaded, which ends the process with the same message.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_client_error = getattr(error, "status_code", _SERVER_ERROR) < _SERVER_ERROR
        return not (is_client_error or isinstance(error, ModelError))


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"server-errors": {"()": f"{__name__}.{NotReportedElsewhere.__name__}"}},
    "formatters": {"line": {"format": "%(asctime)s %(name)s %(levelname)s %(message)s"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "filters": ["server-errors"],
            "formatter": "line",
            "stream": "ext://sys.stderr",
        }
    },
    "root": {"level": "ERROR", "handlers": ["stderr"]},
    "loggers": {
        name: {"level": level, "handlers": [], "propagate": True}
        for name, level in (
            ("mlserver", "ERROR"),
            ("mlserver.grpc", "ERROR"),
            ("uvicorn", "ERROR"),
            ("trimtab_protocol.mutual_tls", "INFO"),  # rejected clients
        )
    },
}
