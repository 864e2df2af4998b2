"""Adjustments of MLServer: a bound of request bodies as on the data port, logging, and reserved ports."""

import logging
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Self

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from trimtab_model_servers.errors import ModelError
from trimtab_pipelines.model_spec import MAX_BODY_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
_SERVER_ERROR = 500


class _BodyTooLarge(HTTPException):
    def __init__(self) -> None:
        super().__init__(413, f"the body is too large; send at most {MAX_BODY_BYTES} bytes")


class _BodyLimit:
    """Raises _BodyTooLarge when an oversized body is read: at once by its Content-Length, else at the limit."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        declared = dict(scope.get("headers", ())).get(b"content-length", b"")
        received = int(declared) if declared.isdigit() and int(declared) > MAX_BODY_BYTES else 0

        async def receive_bounded() -> Message:
            nonlocal received
            if received <= MAX_BODY_BYTES:
                message = await receive()
                received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise _BodyTooLarge
            return message

        await self._app(scope, receive_bounded, send)


async def _reject(_: object, error: Exception) -> JSONResponse:
    return JSONResponse({"error": getattr(error, "detail", "")}, 413, {"Connection": "close"})


def limit_bodies(app: Any) -> None:
    """Answer 413 to oversized bodies on MLServer's REST port."""
    app.add_middleware(_BodyLimit)
    app.add_exception_handler(_BodyTooLarge, _reject)


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
