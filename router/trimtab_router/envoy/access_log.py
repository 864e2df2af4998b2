"""Envoy's access log, without bodies, keys or query strings, counters of its own responses, and tracing."""

from collections.abc import Iterable

from trimtab_pipelines.edge_settings import AccessLogField
from trimtab_protocol.extensions import CLIENT_HEADER, REASON_HEADER
from trimtab_router.envoy.http_filters import Json, typed

COLLECTOR = "collector"
STATS_PREFIX = "proxy"
RESPONSES = "answered"
_FIELDS = {
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
_OPTIONAL_FIELDS: dict[AccessLogField, str] = {
    "user_agent": "%REQ(USER-AGENT):256%",
    "authority": "%REQ(:AUTHORITY):256%",
    "forwarded_for": "%REQ(X-FORWARDED-FOR):256%",
    "tls_version": "%DOWNSTREAM_TLS_VERSION%",
    "certificate_subject": "%DOWNSTREAM_PEER_SUBJECT%",
}


def loggers(verbosity: str, more: Iterable[AccessLogField] = ()) -> list[Json]:
    """Access loggers: the counters always, log lines as the settings say (`Off`, `Refused`, `All`)."""
    refused = {"or_filter": {"filters": [_refused(), _grpc_refused(), _reset()]}}
    configured = [_count() | {"filter": refused}]
    if verbosity != "Off":
        lines = typed(
            "envoy.access_loggers.stdout",
            "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
            log_format={"json_format": _FIELDS | {field: _OPTIONAL_FIELDS[field] for field in more}},
        )
        if verbosity == "Refused":
            lines["filter"] = refused
        configured.append(lines)
    return configured


def tracing(pipeline: str) -> Json:
    """Tracing configuration. The router's spans are children of Envoy's."""
    provider = typed(
        "envoy.tracers.opentelemetry",
        "envoy.config.trace.v3.OpenTelemetryConfig",
        grpc_service={"envoy_grpc": {"cluster_name": COLLECTOR}, "timeout": "0.250s"},
        service_name=f"trimtab-proxy-{pipeline}",
    )
    return {"provider": provider, "max_path_tag_length": 256}


def _count() -> Json:
    """Count responses by detail, status and reason: a gRPC error has status 200."""
    tags = [
        {"name": "detail", "value_format": "%RESPONSE_CODE_DETAILS%"},
        {"name": "status", "value_format": "%RESPONSE_CODE%"},
        {"name": "reason", "value_format": f"%RESP({REASON_HEADER})%"},
    ]
    return typed(
        "envoy.access_loggers.stats",
        "envoy.extensions.access_loggers.stats.v3.Config",
        stats_scope={"prefix": STATS_PREFIX},
        counters=[{"stat": {"name": RESPONSES, "tags": tags}, "value_fixed": 1}],
    )


def _refused() -> Json:
    comparison = {"op": "GE", "value": {"default_value": 400, "runtime_key": "proxy.log.status"}}
    return {"status_code_filter": {"comparison": comparison}}


def _reset() -> Json:
    """Requests reset before a response, such as a stream with invalid headers."""
    comparison = {"op": "EQ", "value": {"default_value": 0, "runtime_key": "proxy.log.reset"}}
    return {"status_code_filter": {"comparison": comparison}}


def _grpc_refused() -> Json:
    """GRPC errors. REST responses, which have no gRPC status, are left to the HTTP status filter."""
    content = {"name": "content-type", "string_match": {"prefix": "application/grpc"}}
    refused = {"grpc_status_filter": {"statuses": ["OK"], "exclude": True}}
    return {"and_filter": {"filters": [{"header_filter": {"header": content}}, refused]}}
