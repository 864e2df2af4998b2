"""What the door tells: a line for each request if wanted, a count of what it refused itself, spans. Pure.

Lines hold what a request was, never what was in it: no bodies, no keys, no query strings.
"""

from collections.abc import Iterable
from typing import Any

from trimtab_pipelines.edge_settings import MoreOfACaller
from trimtab_protocol.extensions import CLIENT_HEADER, REASON_HEADER
from trimtab_router.envoy.http_filters import typed

Json = dict[str, Any]

COLLECTOR = "collector"
STATS_PREFIX = "door"
REFUSED = "answered"
_LINE = {
    "time": "%START_TIME%",
    "client": f"%REQ({CLIENT_HEADER})%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ):256%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "grpc_status": "%GRPC_STATUS%",
    "reason": f"%RESP({REASON_HEADER})%",
    "stage": "%RESP(X-TRIMTAB-STAGE)%",
    "detail": "%RESPONSE_CODE_DETAILS%",
    "received_bytes": "%BYTES_RECEIVED%",
    "sent_bytes": "%BYTES_SENT%",
    "milliseconds": "%DURATION%",
    "router_milliseconds": "%RESPONSE_DURATION%",
    "request_id": "%REQ(X-REQUEST-ID):128%",
    "from": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
}
_MORE: dict[MoreOfACaller, str] = {
    "user_agent": "%REQ(USER-AGENT):256%",
    "authority": "%REQ(:AUTHORITY):256%",
    "forwarded_for": "%REQ(X-FORWARDED-FOR):256%",
    "tls_version": "%DOWNSTREAM_TLS_VERSION%",
    "certificate_subject": "%DOWNSTREAM_PEER_SUBJECT%",
}


def loggers(which: str, more: Iterable[MoreOfACaller] = ()) -> list[Json]:
    """The access loggers: the count always, the lines as the settings say (`Off`, `Refused`, `All`).

    `more` are fields beside those that each line has.
    """
    refused = {"or_filter": {"filters": [_refused(), _grpc_refused(), _reset()]}}
    found = [_count() | {"filter": refused}]
    if which != "Off":
        lines = typed(
            "envoy.access_loggers.stdout",
            "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
            log_format={"json_format": _LINE | {field: _MORE[field] for field in more}},
        )
        if which == "Refused":
            lines["filter"] = refused
        found.append(lines)
    return found


def tracing(pipeline: str) -> Json:
    """The configuration of spans; the router's are children of the door's."""
    provider = typed(
        "envoy.tracers.opentelemetry",
        "envoy.config.trace.v3.OpenTelemetryConfig",
        grpc_service={"envoy_grpc": {"cluster_name": COLLECTOR}, "timeout": "0.250s"},
        service_name=f"trimtab-door-{pipeline}",
    )
    return {"provider": provider, "max_path_tag_length": 256}


def _count() -> Json:
    """Count answers by cause, status and reason: those that did not come from the router are added to what it counted.

    The reason is needed because what is refused over gRPC has status 200.
    """
    tags = [
        {"name": "detail", "value_format": "%RESPONSE_CODE_DETAILS%"},
        {"name": "status", "value_format": "%RESPONSE_CODE%"},
        {"name": "reason", "value_format": f"%RESP({REASON_HEADER})%"},
    ]
    return typed(
        "envoy.access_loggers.stats",
        "envoy.extensions.access_loggers.stats.v3.Config",
        stats_scope={"prefix": STATS_PREFIX},
        counters=[{"stat": {"name": REFUSED, "tags": tags}, "value_fixed": 1}],
    )


def _refused() -> Json:
    comparison = {"op": "GE", "value": {"default_value": 400, "runtime_key": "door.log.status"}}
    return {"status_code_filter": {"comparison": comparison}}


def _reset() -> Json:
    """What was cut before there was an answer, such as a stream whose headers break the rules."""
    comparison = {"op": "EQ", "value": {"default_value": 0, "runtime_key": "door.log.reset"}}
    return {"status_code_filter": {"comparison": comparison}}


def _grpc_refused() -> Json:
    """What has no gRPC status would be none that is OK: the answers of REST are left to their HTTP status."""
    content = {"name": "content-type", "string_match": {"prefix": "application/grpc"}}
    refused = {"grpc_status_filter": {"statuses": ["OK"], "exclude": True}}
    return {"and_filter": {"filters": [{"header_filter": {"header": content}}, refused]}}
