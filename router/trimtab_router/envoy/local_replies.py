"""Envoy's local replies, in the form of the router's: JSON, gRPC or OpenAI errors with reason and retry time."""

from trimtab_pipelines.request_outcome import PROXY_REASONS
from trimtab_protocol import grpc_messages
from trimtab_protocol.chat import openai_responses
from trimtab_protocol.extensions import REASON_HEADER
from trimtab_protocol.host_check import FORBIDDEN
from trimtab_router.envoy.http_filters import Json

OVERLOAD = "the router is overloaded: as many requests are in flight as can be served in time; try again later"
ROUTER_UNAVAILABLE = "the router is unavailable; try again"
GRPC_STATUS = {
    "Malformed": 3,
    "RequestTimeout": 4,
    "Timeout": 4,
    "PayloadTooLarge": 8,
    "Overload": 8,
    "ClientRateLimited": 8,
}
"""gRPC statuses that differ from those that Envoy derives from the HTTP status."""
UNAUTHENTICATED = "no valid API key or token; send it as Authorization: Bearer, or a key as X-API-Key"
FOREIGN_HOST_STATUS = 421
"""Status (Misdirected Request) by which the routes mark a request that becomes 403."""
NOT_FOUND = (
    f"unknown path; over gRPC this server has the unary methods of {grpc_messages.SERVICE}, health and reflection"
)
_UNSUPPORTED = "%REQ(:PATH):200% is not supported: "  # for gRPC; the router itself rejects REST paths, by name


def local_replies(max_payload_bytes: int, max_headers_kib: int, *, chats: bool = False) -> Json:
    sizes = (
        _mapper(
            _status(413),
            "PayloadTooLarge",
            text=f"the body is too large; at most {max_payload_bytes} bytes are accepted",
        ),
        _mapper(
            _status(431),
            "HeadersTooLarge",
            text=f"the headers are too large; at most {max_headers_kib} KiB are accepted",
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
    prefix = _UNSUPPORTED if headers[0]["header"]["value"] == "NotFound" else ""
    return (
        mapper
        | {"body_format_override": {"text_format_source": {"inline_string": f"{prefix}%LOCAL_REPLY_BODY%"}}}
        | _only_for("content-type", "application/grpc", mapper)
        | {"headers_to_add": headers + more}
    )


def _to_chats(mapper: Json) -> Json:
    reason = mapper["headers_to_add"][0]["header"]["value"]
    error = openai_responses.error_body(PROXY_REASONS.get(reason, 504), "%LOCAL_REPLY_BODY%", reason=reason)
    return mapper | _only_for(":path", "/v1/", mapper) | {"body_format_override": _json(error)}


def _header(name: str, value: str) -> Json:
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _json(content: Json) -> Json:
    return {"json_format": content, "content_type": "application/json"}


def _only_for(header: str, prefix: str, mapper: Json) -> Json:
    matcher = {"header": {"name": header, "string_match": {"prefix": prefix}}}
    return {"filter": {"and_filter": {"filters": [{"header_filter": matcher}, mapper["filter"]]}}}


def _mapper(
    condition: Json, reason: str, *, text: str, status: int | None = None, retry_after_seconds: int | None = None
) -> Json:
    headers = {REASON_HEADER: reason}
    if retry_after_seconds is not None:
        headers["retry-after"] = str(retry_after_seconds)
        headers["grpc-retry-pushback-ms"] = str(1000 * retry_after_seconds)
    mapper: Json = {
        "filter": condition,
        "body": {"inline_string": text},
        "headers_to_add": [_header(name, value) for name, value in headers.items()],
    }
    return mapper if status is None else mapper | {"status_code": status}


def _flags(*flags: str) -> Json:
    return {"response_flag_filter": {"flags": list(flags)}}


def _status(code: int) -> Json:
    comparison = {"op": "EQ", "value": {"default_value": code, "runtime_key": f"proxy.status.{code}"}}
    return {"status_code_filter": {"comparison": comparison}}


_MAPPERS = (
    _mapper(_flags("UO"), "Overload", text=OVERLOAD, status=429, retry_after_seconds=1),
    _mapper(
        _flags("UF", "UC", "UH", "LR", "UR"),
        "RouterUnavailable",
        text=ROUTER_UNAVAILABLE,
        status=503,
        retry_after_seconds=1,
    ),
    # Requests rejected unread have no response flag. No other 503 is without one.
    _mapper(_status(503), "Overload", text=OVERLOAD, status=429, retry_after_seconds=1),
    _mapper(_flags("UT"), "Timeout", text="the router did not respond in time"),
    _mapper(_status(400), "Malformed", text="the request violates HTTP, or its path contains escaped slashes"),
    _mapper(_status(401), "Unauthenticated", text=UNAUTHENTICATED),
    _mapper(_status(403), "Forbidden", text="this client may not call this pipeline"),
    _mapper(_status(404), "NotFound", text=NOT_FOUND),
    _mapper(_status(FOREIGN_HOST_STATUS), "Forbidden", text=FORBIDDEN, status=403),
    _mapper(_status(505), "Malformed", status=400, text="gRPC requires HTTP/2"),
    _mapper(_status(408), "RequestTimeout", text="the request did not arrive in time"),
    _mapper(
        _status(429), "ClientRateLimited", text="this client sends more requests than it may", retry_after_seconds=1
    ),
)
