"""`BodyLimit`: ASGI middleware that bounds request bodies of MLServer's REST port as the data port does."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trimtab_pipelines.model_spec import MAX_BODY_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


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
