"""How the door refuses: in the protocol's own form, with the reason and when to try again, as the router does. Pure.

gRPC callers get the status that gRPC maps the HTTP status to, and the same words.
"""

from typing import Any

Json = dict[str, Any]

OVERLOAD = "the router is overloaded: as many requests are under way as can be answered in time; try again later"
ROUTER_AWAY = "the router is not there; try again"
UNAUTHENTICATED = "no known key or token came along; send one as Authorization: Bearer, a key also as X-API-Key"


def local_replies() -> Json:
    """Return the configuration of answers that Envoy gives itself: JSON for REST, the bare words for gRPC."""
    return {
        "mappers": [
            mapper | form for mapper in _MAPPERS for form in ({"filter": _grpc(mapper["filter"]), **_WORDS}, {})
        ],
        "body_format": {"json_format": {"error": "%LOCAL_REPLY_BODY%"}, "content_type": "application/json"},
    }


def _grpc(which: Json) -> Json:
    content = {"header": {"name": "content-type", "string_match": {"prefix": "application/grpc"}}}
    return {"and_filter": {"filters": [{"header_filter": content}, which]}}


def _mapper(
    which: Json,
    reason: str,
    *,
    text: str = "",
    status: int | None = None,
    retry_after_seconds: int | None = None,
) -> Json:
    headers = {"x-trimtab-reason": reason}
    if retry_after_seconds is not None:
        headers["retry-after"] = str(retry_after_seconds)
        headers["grpc-retry-pushback-ms"] = str(1000 * retry_after_seconds)
    mapper: Json = {
        "filter": which,
        "headers_to_add": [
            {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
            for key, value in headers.items()
        ],
    }
    words = {"body": {"inline_string": text}} if text else {}
    return mapper | words | ({} if status is None else {"status_code": status})


def _flags(*flags: str) -> Json:
    return {"response_flag_filter": {"flags": list(flags)}}


def _status(code: int) -> Json:
    comparison = {"op": "EQ", "value": {"default_value": code, "runtime_key": f"door.status.{code}"}}
    return {"status_code_filter": {"comparison": comparison}}


_WORDS: Json = {"body_format_override": {"text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"}}}
_MAPPERS = (
    _mapper(_flags("UO"), "Overload", text=OVERLOAD, status=429, retry_after_seconds=1),
    _mapper(_flags("UF", "UC", "UH", "LR", "UR"), "RouterAway", text=ROUTER_AWAY, status=503, retry_after_seconds=1),
    _mapper(_flags("OM"), "DoorFull", text="the door's memory is used up; try again later", retry_after_seconds=1),
    _mapper(_flags("UT"), "Timeout", text="the router gave no answer in time"),
    _mapper(_status(400), "Malformed"),  # in Envoy's own words
    _mapper(_status(401), "Unauthenticated", text=UNAUTHENTICATED),
    _mapper(_status(403), "Forbidden", text="this client may not call this pipeline"),
    _mapper(_status(408), "RequestTimeout", text="the request did not arrive in time"),
    _mapper(_status(413), "PayloadTooLarge", text="the body is larger than is taken here"),
    _mapper(_status(429), "ClientRate", text="this client sends more requests than it may", retry_after_seconds=1),
    _mapper(_status(431), "HeadersTooLarge", text="the headers are larger than is taken here"),
)
