"""How the door refuses: in the protocol's own form, with the reason and when to try again, as the router does. Pure.

gRPC callers get the same words, and the status that the router gives for the same reason; those who chat get OpenAI's
form of an error.
"""

from typing import Any

from trimtab_pipelines.error_codes import DOOR_REASONS
from trimtab_protocol import grpc_messages
from trimtab_protocol.chat import openai_responses
from trimtab_protocol.extensions import REASON_HEADER

Json = dict[str, Any]

OVERLOAD = "the router is overloaded: as many requests are under way as can be answered in time; try again later"
ROUTER_UNAVAILABLE = "the router is not there; try again"
GRPC_STATUS = {
    "Malformed": 3,
    "RequestTimeout": 4,
    "Timeout": 4,
    "PayloadTooLarge": 8,
    "Overload": 8,
    "ClientRateLimited": 8,
}
"""Where gRPC would make of the HTTP status another than the router says for the same reason."""
UNAUTHENTICATED = "no known key or token came along; send one as Authorization: Bearer, a key also as X-API-Key"
NOT_FOUND = (
    f"nothing is served there; over gRPC ModelInfer, metadata and health of {grpc_messages.SERVICE} are, "
    "without streams, beside health and reflection"
)
_CALLED = "%REQ(:PATH):200% is not supported: "
"""What a gRPC caller asked for; over REST the router answers by itself, and names the path."""


def local_replies(max_payload_bytes: int, max_headers_kib: int, *, chats: bool = False) -> Json:
    """The configuration of answers that Envoy gives itself: JSON for REST, the bare words for gRPC."""
    sizes = (
        _mapper(
            _status(413), "PayloadTooLarge", text=f"the body is too large; at most {max_payload_bytes} bytes are taken"
        ),
        _mapper(
            _status(431), "HeadersTooLarge", text=f"the headers are too large; at most {max_headers_kib} KiB are taken"
        ),
    )
    forms = (_over_grpc, _to_chats, dict) if chats else (_over_grpc, dict)
    return {
        "mappers": [form(mapper) for mapper in (*_MAPPERS, *sizes) for form in forms],
        "body_format": _json({"error": "%LOCAL_REPLY_BODY%"}),
    }


def _over_grpc(mapper: Json) -> Json:
    headers = mapper["headers_to_add"]
    status = GRPC_STATUS.get(headers[0]["header"]["value"])
    more = [] if status is None else [_header("grpc-status", str(status))]
    called = _CALLED if headers[0]["header"]["value"] == "NotFound" else ""
    return (
        mapper | _words(called) | _of("content-type", "application/grpc", mapper) | {"headers_to_add": headers + more}
    )


def _to_chats(mapper: Json) -> Json:
    reason = mapper["headers_to_add"][0]["header"]["value"]
    told = openai_responses.error(DOOR_REASONS.get(reason, 504), "%LOCAL_REPLY_BODY%", reason=reason)
    return mapper | _of(":path", "/v1/", mapper) | {"body_format_override": _json(told)}


def _header(name: str, value: str) -> Json:
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _json(content: Json) -> Json:
    return {"json_format": content, "content_type": "application/json"}


def _of(header: str, prefix: str, mapper: Json) -> Json:
    """A mapper's filter, for requests alone of which a header begins so."""
    begins = {"header": {"name": header, "string_match": {"prefix": prefix}}}
    return {"filter": {"and_filter": {"filters": [{"header_filter": begins}, mapper["filter"]]}}}


def _mapper(
    which: Json,
    reason: str,
    *,
    text: str,
    status: int | None = None,
    retry_after_seconds: int | None = None,
) -> Json:
    headers = {REASON_HEADER: reason}
    if retry_after_seconds is not None:
        headers["retry-after"] = str(retry_after_seconds)
        headers["grpc-retry-pushback-ms"] = str(1000 * retry_after_seconds)
    mapper: Json = {
        "filter": which,
        "body": {"inline_string": text},
        "headers_to_add": [_header(name, value) for name, value in headers.items()],
    }
    return mapper if status is None else mapper | {"status_code": status}


def _flags(*flags: str) -> Json:
    return {"response_flag_filter": {"flags": list(flags)}}


def _status(code: int) -> Json:
    comparison = {"op": "EQ", "value": {"default_value": code, "runtime_key": f"door.status.{code}"}}
    return {"status_code_filter": {"comparison": comparison}}


def _words(before: str) -> Json:
    return {"body_format_override": {"text_format_source": {"inline_string": f"{before}%LOCAL_REPLY_BODY%"}}}


_MAPPERS = (
    _mapper(_flags("UO"), "Overload", text=OVERLOAD, status=429, retry_after_seconds=1),
    _mapper(
        _flags("UF", "UC", "UH", "LR", "UR"),
        "RouterUnavailable",
        text=ROUTER_UNAVAILABLE,
        status=503,
        retry_after_seconds=1,
    ),
    # What is refused unread bears no flag; nothing else is a 503 without one.
    _mapper(_status(503), "Overload", text=OVERLOAD, status=429, retry_after_seconds=1),
    _mapper(_flags("UT"), "Timeout", text="the router gave no answer in time"),
    _mapper(_status(400), "Malformed", text="the request breaks the rules of HTTP, or its path hides another"),
    _mapper(_status(401), "Unauthenticated", text=UNAUTHENTICATED),
    _mapper(_status(403), "Forbidden", text="this client may not call this pipeline"),
    _mapper(_status(404), "NotFound", text=NOT_FOUND),
    _mapper(_status(505), "Malformed", status=400, text="gRPC goes over HTTP/2; over HTTP/1.1 nobody is served by it"),
    _mapper(_status(408), "RequestTimeout", text="the request did not arrive in time"),
    _mapper(
        _status(429), "ClientRateLimited", text="this client sends more requests than it may", retry_after_seconds=1
    ),
)
