"""MLServer's REST port takes bodies of any size; this keeps them below what the data port takes too."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trimtab_pipelines.model_spec import MAX_BODY_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class BodyLimit:
    """An ASGI application around another, which answers 413 where a body is too large.

    One that says its size is refused before it is read; one that does not, as soon as it has grown too large.
    """

    def __init__(self, app: App, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _declared_bytes(scope) > self._max_bytes:
            await self._refuse(send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        received = 0
        answered = False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                return {"type": "http.disconnect"}  # ends the reading; what is answered to it goes nowhere
            return message

        async def unless_too_large(message: Message) -> None:
            nonlocal answered
            if received <= self._max_bytes:
                await send(message)
            elif not answered:
                answered = True
                await self._refuse(send)

        try:
            await self._app(scope, counted, unless_too_large)
        except Exception:
            if received <= self._max_bytes:
                raise
        if received > self._max_bytes and not answered:
            await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        body = json.dumps({"error": f"the body is too large; send at most {self._max_bytes} bytes"}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _declared_bytes(scope: MutableMapping[str, Any]) -> int:
    written = dict(scope["headers"]).get(b"content-length", b"")
    return int(written) if written.isdigit() else 0
