"""What Envoy starts with: where it listens, whom it trusts, what it bounds. Pure.

Nothing in here changes while the door is open, so no connection is dropped for a change: what does change (keys, how
many requests may be under way) comes with the routes, which Envoy asks its router for, or through its administration.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_pipelines.edge_settings import EdgeSettings, JwtIssuer
from trimtab_router.envoy import access_log, certificates, http_filters
from trimtab_router.envoy.http_filters import API, address, typed
from trimtab_router.envoy.local_replies import local_replies
from trimtab_router.envoy.memory_limits import heap_bytes
from trimtab_router.envoy.sockets import SocketFolder

Json = dict[str, Any]

REQUESTS, LARGE, SERVICES, CONTROL = "requests", "large", "services", "control"
"""Names of the clusters, each a socket of the router's; large requests have bounds of their own at the same one."""
ROUTES = "door"
ROUTES_REFRESH_SECONDS = 0.5
MAX_HEADERS_KIB = 16
MAX_HEADERS = 100
STREAM_WINDOW_BYTES = 2**18
CONNECTION_WINDOW_BYTES = 2**20
CONNECTION_BUFFER_BYTES = 2**18
FIRST_MOST_UNDER_WAY = 128
"""Requests under way at the router until it says how many it can answer in time."""
LEAST_LARGE_UNDER_WAY = 32
"""Requests at once that are not held at the door until they are whole, however few the router can answer in time.

They have places of their own, so that no slow upload takes a small one's.
"""
LARGE_HELD_BYTES = 2 * CONNECTION_BUFFER_BYTES
"""What one of them holds here while the router reads nothing: as much as its two connections may.

Each may have one read more than that, 128 KiB, where Envoy finds as much waiting.
"""
LARGE_HEAP_SHARE = 0.5
"""Of what Envoy may allocate, what large requests may hold: less than from where on it cuts callers."""
_COUNTED = (
    r"door\.answered.*"
    r"|http\.door\.(downstream_(rq|cx)_(http[12]_)?(total|active)|downstream_rq_rx_reset)"
    r"|cluster\.[a-z0-9-]+\.(upstream_(rq|cx)_(total|active|overflow|connect_fail)|circuit_breakers\..*)"
    r"|(listener_manager|cluster_manager|server|overload|runtime)\..*"
    r"|.*key_rotation_failed"
)
"""What Envoy counts: what the router reads, and what tells why a door does not serve. Each of its other counts costs
every request something, and nobody reads them."""
_IN_TURN: Json = {"http.max_requests_per_io_cycle": 1}
"""How many requests of one connection are begun before other connections, and answers, have their turn.

Without it all that a connection brought at once is read first: hundreds of a flood, to be refused, before one answer of
the router's goes on. Its router waits meanwhile, and gets less to do the more is offered.
"""
_TRUSTED_CAS = "/etc/ssl/certs/ca-certificates.crt"


def bootstrap(settings: EdgeSettings, doorstep: SocketFolder, *, pipeline: str, otlp: str | None = None) -> Json:
    """Envoy's whole configuration.

    Args:
        settings: what was asked of the door.
        doorstep: where it listens and where its router is.
        pipeline: the pipeline's name, which tokens may be bound to.
        otlp: HOST:PORT of an OpenTelemetry collector that takes spans over gRPC; None traces nothing.
    """
    sockets = doorstep.sockets
    clusters = [
        _cluster(REQUESTS, _pipe(sockets.requests), _HTTP1, circuit_breakers=_breakers(bounds(FIRST_MOST_UNDER_WAY))),
        _large(sockets.requests, heap_bytes(settings)),
        _cluster(SERVICES, _pipe(sockets.services), _HTTP2),
        _cluster(CONTROL, _pipe(sockets.control), _HTTP1),
        *(_issuer_cluster(number, issuer) for number, issuer in enumerate(settings.jwt) if _is_address(issuer)),
    ]
    if otlp:
        clusters.append(_cluster(access_log.COLLECTOR, _host(otlp), _HTTP2, type="STRICT_DNS"))

    return {
        "node": {"id": f"door-{pipeline}", "cluster": "trimtab"},
        "admin": {"address": _pipe(sockets.envoy)},
        "layered_runtime": {
            "layers": [{"name": "turns", "static_layer": _IN_TURN}, {"name": "router", "admin_layer": {}}]
        },
        "stats_config": {"stats_matcher": {"inclusion_list": {"patterns": [{"safe_regex": {"regex": _COUNTED}}]}}},
        "overload_manager": _overload(settings, sockets.pressure),
        "static_resources": {
            "listeners": [_listener(settings, doorstep, _connections(settings, doorstep, pipeline, traced=bool(otlp)))],
            "clusters": clusters,
        },
    }


def bounds(most_under_way: int) -> dict[str, int]:
    """What Envoy bounds the requests at the router by; as many again may wait for a connection."""
    return dict.fromkeys(("max_connections", "max_requests", "max_pending_requests"), most_under_way)


def large_bounds(most_under_way: int, heap: int) -> dict[str, int]:
    """The same for large ones, where nobody waits: with connections to spare, one too many is refused at once.

    A chat's images make it large, and it keeps its place until its last word: a bound of their own that is less than
    what the router can answer would leave replicas idle. While the router reads nothing, each fills its buffers here.

    Args:
        most_under_way: what the router can answer in time.
        heap: bytes that Envoy may allocate.
    """
    fit = int(LARGE_HEAP_SHARE * heap / LARGE_HELD_BYTES)
    most = max(LEAST_LARGE_UNDER_WAY, min(most_under_way, fit))
    return bounds(most) | {"max_connections": 2 * most}


def _listener(settings: EdgeSettings, doorstep: SocketFolder, manager: Json) -> Json:
    """One listener with two ports: what a client may take it may take of both together."""
    chain: Json = {"filters": [manager]}
    if settings.tls is not None:
        chain["transport_socket"] = typed(
            "envoy.transport_sockets.tls",
            "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            **certificates.context(settings.tls, doorstep.told_in),
        )
    return {
        "name": "door",
        "address": address(doorstep.host, doorstep.rest_port),
        "additional_addresses": [{"address": address(doorstep.host, doorstep.grpc_port)}],
        # With it two doors on one port would share its callers instead of one being told that the port is taken.
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        "listener_filters_timeout": _seconds(settings.timeouts.headers_seconds),
        "filter_chains": [{**chain, "transport_socket_connect_timeout": _seconds(settings.timeouts.headers_seconds)}],
    }


def _connections(settings: EdgeSettings, doorstep: SocketFolder, pipeline: str, *, traced: bool) -> Json:
    """The HTTP connection manager: both protocols and both versions on either port."""
    patience = settings.timeouts
    fields: Json = {
        "stat_prefix": "door",
        "codec_type": "AUTO",
        "rds": {"route_config_name": ROUTES, "config_source": _from_router()},
        "early_header_mutation_extensions": [http_filters.protocol_version_filter()],
        "http_filters": http_filters.chain(settings, doorstep.max_payload_bytes),
        "local_reply_config": local_replies(doorstep.max_payload_bytes, MAX_HEADERS_KIB, chats=doorstep.chats),
        "access_log": access_log.loggers(settings.access_log, settings.access_log_fields),
        "server_name": "trimtab",
        "use_remote_address": True,
        "xff_num_trusted_hops": settings.trusted_hops,
        # Nobody's x-envoy-… headers count, wherever he calls from.
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "255.255.255.255", "prefix_len": 32}]},
        # An id that nobody reads is not worth making, nor what proxies tell of each other that the router does not use.
        "generate_request_id": traced or settings.access_log != "Off",
        "preserve_external_request_id": True,
        "skip_xff_append": True,
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "max_request_headers_kb": MAX_HEADERS_KIB,
        "request_headers_timeout": _seconds(patience.headers_seconds),
        "request_timeout": _seconds(patience.body_seconds),
        "stream_idle_timeout": _seconds(patience.idle_seconds),
        "delayed_close_timeout": "1s",
        "drain_timeout": "5s",
        "common_http_protocol_options": {
            "idle_timeout": _seconds(patience.idle_seconds),
            "max_connection_duration": _seconds(patience.connection_age_seconds),
            "max_headers_count": MAX_HEADERS,
        },
        "http2_protocol_options": {
            "max_concurrent_streams": settings.max_streams,
            "initial_stream_window_size": STREAM_WINDOW_BYTES,
            "initial_connection_window_size": CONNECTION_WINDOW_BYTES,
            "override_stream_error_on_invalid_http_message": True,
            "connection_keepalive": {"interval": "30s", "timeout": "10s"},
        },
    }
    if traced:
        fields["tracing"] = access_log.tracing(pipeline)
    return typed(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        **fields,
    )


def _from_router() -> Json:
    source = {
        "api_type": "REST",
        "transport_api_version": "V3",
        "cluster_names": [CONTROL],
        "refresh_delay": _seconds(ROUTES_REFRESH_SECONDS),
        "request_timeout": "5s",
    }
    return {"resource_api_version": "V3", "api_config_source": source, "initial_fetch_timeout": "0s"}


def _overload(settings: EdgeSettings, pressure: Path) -> Json:
    """Before memory ends: give back what is free, cut the fattest callers, then take nobody new.

    In a flood the router says which share of all requests is refused before it is read.
    """
    heap, connections, told = (
        "envoy.resource_monitors.fixed_heap",
        "envoy.resource_monitors.global_downstream_max_connections",
        "envoy.resource_monitors.injected_resource",
    )

    def above(action: str, share: float) -> Json:
        return {"name": f"envoy.overload_actions.{action}", "triggers": [{"name": heap, "threshold": {"value": share}}]}

    return {
        # Bodies come from the same machine by hundreds of MiB a second; looking often costs next to nothing.
        "refresh_interval": "0.050s",
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 20},
        "resource_monitors": [
            typed(
                heap,
                "envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                max_heap_size_bytes=heap_bytes(settings),
            ),
            typed(
                connections,
                "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                max_active_downstream_connections=settings.max_connections,
            ),
            typed(
                told,
                "envoy.extensions.resource_monitors.injected_resource.v3.InjectedResourceConfig",
                filename=str(pressure),
            ),
        ],
        "loadshed_points": [
            {
                "name": "envoy.load_shed_points.http_connection_manager_decode_headers",
                "triggers": [{"name": told, "scaled": {"scaling_threshold": 0.0, "saturation_threshold": 1.0}}],
            }
        ],
        "actions": [
            above("shrink_heap", 0.7),
            {
                "name": "envoy.overload_actions.reset_high_memory_stream",
                "triggers": [
                    {"name": heap, "scaled": {"scaling_threshold": 0.55, "saturation_threshold": 0.85}},
                ],
            },
            above("stop_accepting_requests", 0.95),
            above("stop_accepting_connections", 0.98),
        ],
    }


def _cluster(name: str, address: Json, protocol: Json, **more: Any) -> Json:
    protocols = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {
        "@type": API + protocols,
        "explicit_http_config": protocol,
        "common_http_protocol_options": {"idle_timeout": "60s"},
    }
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        "typed_extension_protocol_options": {protocols: options},
        **more,
    }


def _large(socket: Path, heap: int) -> Json:
    """The way of large requests. Envoy's own buffer would be a mebibyte for each."""
    return _cluster(
        LARGE,
        _pipe(socket),
        _HTTP1,
        circuit_breakers=_breakers(large_bounds(0, heap)),
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
    )


def _issuer_cluster(number: int, issuer: JwtIssuer) -> Json:
    host, _, port = issuer.jwks.removeprefix("https://").partition("/")[0].partition(":")
    context: Mapping[str, Any] = {
        "sni": host,
        "common_tls_context": {
            "validation_context": {
                "trusted_ca": {"filename": _TRUSTED_CAS},
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": host}}],
            }
        },
    }
    return _cluster(
        f"issuer-{number}",
        _host(f"{host}:{port or 443}"),
        _HTTP1,
        type="STRICT_DNS",
        transport_socket=typed(
            "envoy.transport_sockets.tls",
            "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            **context,
        ),
    )


def _breakers(bounds_of_cluster: Mapping[str, int]) -> Json:
    return {"thresholds": [{**bounds_of_cluster, "max_retries": 16}]}


def _is_address(issuer: JwtIssuer) -> bool:
    return issuer.jwks.startswith("https://")


def _pipe(path: object) -> Json:
    return {"pipe": {"path": str(path)}}


def _host(written: str) -> Json:
    host, _, port = written.rpartition(":")
    return address(host.strip("[]"), int(port))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}s"


_HTTP1: Json = {"http_protocol_options": {"enable_trailers": True}}
_HTTP2: Json = {"http2_protocol_options": {}}
