"""Envoy's bootstrap configuration: listeners, TLS, clusters and limits.

Nothing here changes while Envoy runs, so no connection is dropped for a change. API keys come with the routes, which
Envoy polls from the router. Limits are set through its admin socket.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_pipelines.edge_settings import EdgeSettings, JwtIssuer
from trimtab_router.envoy import access_log, certificates, http_filters
from trimtab_router.envoy.http_filters import API, Json, address, static_cluster, typed
from trimtab_router.envoy.local_replies import local_replies
from trimtab_router.envoy.sockets import SocketFolder
from trimtab_router.limits import heap_bytes

REQUESTS, LARGE, SERVICES, CONTROL = "requests", "large", "services", "control"
"""Names of the clusters, each a socket of the router. Large requests have limits of their own at the same socket."""
ROUTES = "proxy"
ROUTES_REFRESH_SECONDS = 0.5
MAX_HEADERS_KIB = 16
MAX_HEADERS = 100
STREAM_WINDOW_BYTES = 2**18
CONNECTION_WINDOW_BYTES = 2**20
CONNECTION_BUFFER_BYTES = 2**18
INITIAL_MAX_IN_FLIGHT = 128  # maximum requests in flight until the router sets its concurrency limit
MIN_LARGE_IN_FLIGHT = 32
"""Minimum limit of large requests, which Envoy does not buffer, whatever the concurrency limit.

They have a limit of their own, so that slow uploads do not displace small requests.
"""
LARGE_REQUEST_BYTES = 2 * CONNECTION_BUFFER_BYTES  # while unread: two buffers, each of which may grow by 128 KiB
LARGE_HEAP_SHARE = 0.5  # share of Envoy's heap that large requests may use, below the share at which streams are reset
_COUNTED = (
    r"proxy\.answered.*"
    r"|http\.proxy\.(downstream_(rq|cx)_(http[12]_)?(total|active)|downstream_rq_rx_reset)"
    r"|cluster\.[a-z0-9-]+\.(upstream_(rq|cx)_(total|active|overflow|connect_fail)|circuit_breakers\..*)"
    r"|(listener_manager|cluster_manager|server|overload|runtime)\..*"
    r"|.*key_rotation_failed"
)
"""Envoy's statistics that the router reads, or that explain why Envoy does not serve. Others cost time per request."""
_ONE_REQUEST_PER_TURN: Json = {"http.max_requests_per_io_cycle": 1}
"""Requests of one connection that Envoy starts before it serves other connections and responses.

Without this limit Envoy first reads everything that a connection has sent: in a flood hundreds of requests, most of
them rejected, before it forwards one response of the router. The router idles meanwhile.
"""
_TRUSTED_CAS = "/etc/ssl/certs/ca-certificates.crt"


def bootstrap(settings: EdgeSettings, socket_folder: SocketFolder, *, pipeline: str, otlp: str | None = None) -> Json:
    """Envoy's complete configuration. `otlp` is HOST:PORT of a collector of spans, None for no tracing."""
    sockets = socket_folder.sockets
    clusters = [
        _cluster(
            REQUESTS,
            _pipe(sockets.requests),
            _HTTP1,
            circuit_breakers=_breakers(circuit_breaker_limits(INITIAL_MAX_IN_FLIGHT)),
        ),
        _large(sockets.requests, heap_bytes(settings)),
        _cluster(SERVICES, _pipe(sockets.services), _HTTP2),
        _cluster(CONTROL, _pipe(sockets.control), _HTTP1),
        *(_issuer_cluster(n, issuer) for n, issuer in enumerate(settings.jwt) if issuer.jwks.startswith("https://")),
    ]
    if otlp:
        clusters.append(_cluster(access_log.COLLECTOR, _host(otlp), _HTTP2, type="STRICT_DNS"))

    return {
        "node": {"id": f"proxy-{pipeline}", "cluster": "trimtab"},
        "admin": {"address": _pipe(sockets.envoy_admin)},
        "layered_runtime": {
            "layers": [{"name": "turns", "static_layer": _ONE_REQUEST_PER_TURN}, {"name": "router", "admin_layer": {}}]
        },
        "stats_config": {"stats_matcher": {"inclusion_list": {"patterns": [{"safe_regex": {"regex": _COUNTED}}]}}},
        "overload_manager": _overload(settings, sockets.pressure),
        "static_resources": {
            "listeners": [
                _listener(settings, socket_folder, _connections(settings, socket_folder, pipeline, traced=bool(otlp)))
            ],
            "clusters": clusters,
        },
    }


def circuit_breaker_limits(max_in_flight: int) -> dict[str, int]:
    """Circuit breaker limits of the requests to the router. As many again may wait for a connection."""
    return dict.fromkeys(("max_connections", "max_requests", "max_pending_requests"), max_in_flight)


def large_request_limits(max_in_flight: int, heap: int) -> dict[str, int]:
    """Circuit breaker limits of large requests, such as chats; an excess one is rejected instead of queued."""
    maximum = max_large_requests(max_in_flight, heap)
    return circuit_breaker_limits(maximum) | {"max_connections": 2 * maximum}


def max_large_requests(max_in_flight: int, heap: int) -> int:
    """Below the concurrency limit replicas would idle. While the router does not read, requests fill Envoy's heap."""
    return max(MIN_LARGE_IN_FLIGHT, min(max_in_flight, int(LARGE_HEAP_SHARE * heap / LARGE_REQUEST_BYTES)))


def _listener(settings: EdgeSettings, socket_folder: SocketFolder, manager: Json) -> Json:
    """One listener with two ports, so that a client's limits cover both."""
    chain: Json = {"filters": [manager]}
    if settings.tls is not None:
        chain["transport_socket"] = typed(
            "envoy.transport_sockets.tls",
            "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            **certificates.context(settings.tls, socket_folder.certificates_folder),
        )
    return {
        "name": "proxy",
        "address": address(socket_folder.host, socket_folder.rest_port),
        "additional_addresses": [{"address": address(socket_folder.host, socket_folder.grpc_port)}],
        # With it two Envoys on one port would share the connections instead of the second failing to start.
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        "listener_filters_timeout": _seconds(settings.timeouts.headers_seconds),
        "filter_chains": [{**chain, "transport_socket_connect_timeout": _seconds(settings.timeouts.headers_seconds)}],
    }


def _connections(settings: EdgeSettings, socket_folder: SocketFolder, pipeline: str, *, traced: bool) -> Json:
    timeouts = settings.timeouts
    fields: Json = {
        "stat_prefix": "proxy",
        "codec_type": "AUTO",
        "rds": {"route_config_name": ROUTES, "config_source": _from_router()},
        "early_header_mutation_extensions": [http_filters.protocol_version_filter()],
        "http_filters": http_filters.chain(settings, socket_folder.max_payload_bytes),
        "local_reply_config": local_replies(
            socket_folder.max_payload_bytes, MAX_HEADERS_KIB, chats=socket_folder.chats
        ),
        "access_log": access_log.loggers(settings.access_log, settings.access_log_fields),
        "server_name": "trimtab",
        "use_remote_address": True,
        "xff_num_trusted_hops": settings.trusted_hops,
        # x-envoy-… headers of clients are ignored, whatever their address.
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "255.255.255.255", "prefix_len": 32}]},
        # Request ids are generated only if they are logged or traced.
        "generate_request_id": traced or settings.access_log != "Off",
        "preserve_external_request_id": True,
        "skip_xff_append": True,
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "max_request_headers_kb": MAX_HEADERS_KIB,
        "request_headers_timeout": _seconds(timeouts.headers_seconds),
        "request_timeout": _seconds(timeouts.body_seconds),
        "stream_idle_timeout": _seconds(timeouts.idle_seconds),
        "delayed_close_timeout": "1s",
        "drain_timeout": "5s",
        "common_http_protocol_options": {
            "idle_timeout": _seconds(timeouts.idle_seconds),
            "max_connection_duration": _seconds(timeouts.connection_age_seconds),
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
    """Release free memory, reset the largest streams, then accept no more requests and connections."""
    heap, connections, pressure_monitor = (
        "envoy.resource_monitors.fixed_heap",
        "envoy.resource_monitors.global_downstream_max_connections",
        "envoy.resource_monitors.injected_resource",
    )

    def above(action: str, share: float) -> Json:
        return {"name": f"envoy.overload_actions.{action}", "triggers": [{"name": heap, "threshold": {"value": share}}]}

    return {
        # Clients on the same machine send hundreds of MiB per second, and a short interval costs little.
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
                pressure_monitor,
                "envoy.extensions.resource_monitors.injected_resource.v3.InjectedResourceConfig",
                filename=str(pressure),
            ),
        ],
        "loadshed_points": [
            {
                "name": "envoy.load_shed_points.http_connection_manager_decode_headers",
                "triggers": [
                    {"name": pressure_monitor, "scaled": {"scaling_threshold": 0.0, "saturation_threshold": 1.0}}
                ],
            }
        ],
        "actions": [
            above("shrink_heap", 0.7),
            {
                "name": "envoy.overload_actions.reset_high_memory_stream",
                "triggers": [{"name": heap, "scaled": {"scaling_threshold": 0.55, "saturation_threshold": 0.85}}],
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
    return static_cluster(name, address, typed_extension_protocol_options={protocols: options}, **more)


def _large(socket: Path, heap: int) -> Json:
    """Cluster of large requests, with a smaller buffer than Envoy's default of 1 MiB."""
    return _cluster(
        LARGE,
        _pipe(socket),
        _HTTP1,
        circuit_breakers=_breakers(large_request_limits(0, heap)),
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
            "envoy.transport_sockets.tls", "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext", **context
        ),
    )


def _breakers(bounds_of_cluster: Mapping[str, int]) -> Json:
    return {"thresholds": [{**bounds_of_cluster, "max_retries": 16}]}


def _pipe(path: object) -> Json:
    return {"pipe": {"path": str(path)}}


def _host(host_port: str) -> Json:
    host, _, port = host_port.rpartition(":")
    return address(host.strip("[]"), int(port))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}s"


_HTTP1: Json = {"http_protocol_options": {"enable_trailers": True}}
_HTTP2: Json = {"http2_protocol_options": {}}
