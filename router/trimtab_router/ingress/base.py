"""`HttpIngress`: base of the REST and OpenAI handlers, and HTTP responses that all ingress shares."""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping

from aiohttp import web

from trimtab_protocol.extensions import REASON_HEADER, STAGE_HEADER
from trimtab_protocol.sanitize import printable
from trimtab_router.ingress.request_parsing import abort_connection, request_id
from trimtab_router.refusal import Refusal, failure
from trimtab_router.router import Router

log = logging.getLogger(__name__)

READ_SECONDS = 10.0
"""Time limit for a client to read one write, of at most a megabyte, of its response."""


class HttpIngress(ABC):
    """HTTP handler over a router: error responses, and connections of a terminating router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a request."""
        response = await self._respond(request)
        if self._router.terminating:
            response.force_close()  # the client's next request finds another router
        return response

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self.route(request)
        except Refusal as refusal:
            return self.refuse(request, refusal)
        except ConnectionError:
            raise
        except web.HTTPException as error:
            return json_response(self.http_error_body(error.status, error.text or error.reason), error.status)
        except Exception:
            log.exception("%s %s failed", printable(request.method, 100), printable(request.path, 200))
            return self.refuse(request, failure("InternalError", "the request failed", request_id(request)))

    @abstractmethod
    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a request; a Refusal becomes an error response."""

    @abstractmethod
    def error_body(self, refusal: Refusal) -> object:
        """JSON body of a refusal."""

    @abstractmethod
    def http_error_body(self, status: int, message: str) -> object:
        """JSON body of an error of the HTTP server."""

    def refuse(self, request: web.BaseRequest, refusal: Refusal) -> web.Response:
        headers = {REASON_HEADER: refusal.reason}
        if refusal.stage:
            headers[STAGE_HEADER] = refusal.stage
        if refusal.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, round(refusal.retry_after_seconds)))
        response = json_response(self.error_body(refusal), refusal.code.value, headers)
        if not request.content.is_eof():
            response.force_close()  # the rest of the body is not read
        return response


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON response."""
    body = json.dumps(content).encode()
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


async def require_timely_read(request: web.BaseRequest, write: Awaitable[None]) -> None:
    """Await a write. Raises ConnectionResetError, and closes the connection, if the client does not read it in time."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            await write
    except TimeoutError:
        abort_connection(request)
        raise ConnectionResetError("the client does not read its response") from None
