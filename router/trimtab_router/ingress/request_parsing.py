"""Parsing of V2 requests into calls, for REST and gRPC."""

import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from trimtab_protocol import PendingRequest, ProtocolError
from trimtab_protocol.extensions import CLIENT_HEADER
from trimtab_protocol.sanitize import MAX_HEADER_CHARACTERS, header_value
from trimtab_router.admission.call import Call
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.refusal import Refusal, failure, malformed
from trimtab_router.router import Router

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ParsedHeader:
    """A request parsed up to its tensors' descriptions, and the time left according to its transport."""

    pending: PendingRequest
    deadline_seconds: float | None = None


ReadHeader = Callable[[Reservation], Awaitable[ParsedHeader]]


async def parse_call(
    router: Router, request: web.BaseRequest, reservation: Reservation, arrived_at: float, read_header: ReadHeader
) -> Call:
    """Parse and validate a request. Raises Refusal, already counted."""
    headers = request.headers
    try:
        header = await read_header(reservation)
    except ProtocolError as error:
        raise router.accounting.count_rejection(malformed(error)) from error
    except Refusal as refusal:
        raise router.accounting.count_rejection(refusal) from refusal
    except Exception as error:
        log.exception("a request cannot be read")
        raise router.accounting.count_rejection(
            failure("InternalError", "the request cannot be read", request_id(request))
        ) from error
    validated = await router.validate(header.pending, reservation)
    return Call(
        validated.request,
        arrived_at,
        deadline_seconds=header.deadline_seconds,
        request_id=headers.get("x-request-id", ""),
        trace_parent=headers.get("traceparent", ""),
        validated=validated,
        reservation=reservation,
    )


def request_client(request: web.BaseRequest) -> str:
    """Name of the client, empty if unknown."""
    return client_name(request.headers.get(CLIENT_HEADER, ""))


def client_name(name: str) -> str:
    """Client name that is safe for a header. A long one is cut and ends with its digest, so that it stays unique."""
    if len(name) <= MAX_HEADER_CHARACTERS:
        return header_value(name)
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return header_value(f"{name[: MAX_HEADER_CHARACTERS - len(digest) - 1]}#{digest}")


def request_id(request: web.BaseRequest) -> str:
    """Request id that is safe for a header."""
    return header_value(request.headers.get("x-request-id", ""))


def abort_connection(request: web.BaseRequest) -> None:
    """Close the connection of a client that does not read its response."""
    if request.transport is not None:
        request.transport.abort()
