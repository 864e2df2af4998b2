"""From a body to a call: REST and gRPC read it in their own ways; what may go wrong, and how it counts, is the same."""

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
    """A request read up to its tensors' descriptions; `deadline_seconds` is what the transport says is left."""

    pending: PendingRequest
    deadline_seconds: float | None = None


Describe = Callable[[Reservation], Awaitable[ParsedHeader]]


async def parse_call(
    router: Router, request: web.BaseRequest, reservation: Reservation, arrived_at: float, describe: Describe
) -> Call:
    """The call that a request is; raises Refusal, already counted."""
    headers = request.headers
    try:
        described = await describe(reservation)
    except ProtocolError as error:
        raise router.accounts.turned_away(malformed(error)) from error
    except Refusal as refusal:
        raise router.accounts.turned_away(refusal) from refusal
    except Exception as error:
        log.exception("a request cannot be read")
        raise router.accounts.turned_away(
            failure("InternalError", "the request cannot be read", request_id(request))
        ) from error
    admitted = await router.validate(described.pending, reservation)
    return Call(
        admitted.request,
        arrived_at,
        deadline_seconds=described.deadline_seconds,
        request_id=headers.get("x-request-id", ""),
        trace_parent=headers.get("traceparent", ""),
        admitted=admitted,
        reservation=reservation,
    )


def client(request: web.BaseRequest) -> str:
    """Who calls, empty where nobody found out."""
    return client_name(request.headers.get(CLIENT_HEADER, ""))


def client_name(told: str) -> str:
    """A client's name, fit to travel; of one that is too long its beginning and its digest, so that no two are one."""
    if len(told) <= MAX_HEADER_CHARACTERS:
        return header_value(told)
    digest = hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()
    return header_value(f"{told[: MAX_HEADER_CHARACTERS - len(digest) - 1]}#{digest}")


def request_id(request: web.BaseRequest) -> str:
    """The request's id, fit to travel."""
    return header_value(request.headers.get("x-request-id", ""))


def client_disconnected(request: web.BaseRequest) -> None:
    """End the connection of a request whose answer nobody reads."""
    if request.transport is not None:
        request.transport.abort()
