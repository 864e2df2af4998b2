"""How the door refuses: in the protocol's own form, with the reason and when to try again, as the router does. Pure.

gRPC callers get the status that gRPC maps the HTTP status to, and the same words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_protocol import grpc_messages

Json = dict[str, Any]

OVERLOAD = "the router is overloaded: as many requests are under way as can be answered in time; try again later"
ROUTER_AWAY = "the router is not there; try again"
UNAUTHENTICATED = "no known key or token came along; send one as Authorization: Bearer, a key also as X-API-Key"
NOT_FOUND = (
    f"nothing is served there; over gRPC {grpc_messages.SERVICE} is, without streams, beside health and reflection"
)


def local_replies() -> Json:
    """Return the configuration of answers that Envoy gives itself: JSON for REST, the bare words for gRPC."""
    return {
        "mappers": [form for mapper in _MAPPERS for form in (_for_grpc(mapper), mapper.written)],
        "body_format": {"json_format": {"error": "%LOCAL_REPLY_BODY%"}, "content_type": "application/json"},
    }


@dataclass(frozen=True, slots=True)
class _Mapper:
    """How to refuse in one case; `grpc_status` where it is not what gRPC makes of the HTTP status by itself."""

    which: Json
    reason: str
    text: str
    status: int | None = None
    grpc_status: int | None = None
    retry_after_seconds: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        seconds = self.retry_after_seconds
        again = {} if seconds is None else {"retry-after": f"{seconds}", "grpc-retry-pushback-ms": f"{1000 * seconds}"}
        return {"x-trimtab-reason": self.reason, **again}

    @property
    def written(self) -> Json:
        status = {} if self.status is None else {"status_code": self.status}
        return {
            "filter": self.which,
            "body": {"inline_string": self.text},
            "headers_to_add": _added(self.headers),
            **status,
        }


def _for_grpc(mapper: _Mapper) -> Json:
    content = {"header": {"name": "content-type", "string_match": {"prefix": "application/grpc"}}}
    status = {} if mapper.grpc_status is None else {"grpc-status": str(mapper.grpc_status)}
    return mapper.written | {
        "filter": {"and_filter": {"filters": [{"header_filter": content}, mapper.which]}},
        "headers_to_add": _added(mapper.headers | status),
        "body_format_override": {"text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"}},
    }


def _added(headers: Mapping[str, str]) -> list[Json]:
    return [
        {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        for key, value in headers.items()
    ]


def _flags(*flags: str) -> Json:
    return {"response_flag_filter": {"flags": list(flags)}}


def _status(code: int) -> Json:
    comparison = {"op": "EQ", "value": {"default_value": code, "runtime_key": f"door.status.{code}"}}
    return {"status_code_filter": {"comparison": comparison}}


_DEADLINE_EXCEEDED, _RESOURCE_EXHAUSTED = 4, 8
_MAPPERS = (
    _Mapper(_flags("UO"), "Overload", OVERLOAD, status=429, retry_after_seconds=1),
    _Mapper(_flags("UF", "UC", "UH", "LR", "UR"), "RouterAway", ROUTER_AWAY, status=503, retry_after_seconds=1),
    _Mapper(_flags("OM"), "DoorFull", "the door's memory is used up; try again later", retry_after_seconds=1),
    _Mapper(_flags("UT"), "Timeout", "the router gave no answer in time", grpc_status=_DEADLINE_EXCEEDED),
    _Mapper(_status(401), "Unauthenticated", UNAUTHENTICATED),
    _Mapper(_status(403), "Forbidden", "this client may not call this pipeline"),
    _Mapper(_status(404), "NotFound", NOT_FOUND),
    _Mapper(_status(408), "RequestTimeout", "the request did not arrive in time", grpc_status=_DEADLINE_EXCEEDED),
    _Mapper(_status(413), "PayloadTooLarge", "the body is larger than is taken here", grpc_status=_RESOURCE_EXHAUSTED),
    _Mapper(_status(429), "ClientRate", "this client sends more requests than it may", retry_after_seconds=1),
    _Mapper(_status(431), "HeadersTooLarge", "the headers are larger than is taken here"),
)
