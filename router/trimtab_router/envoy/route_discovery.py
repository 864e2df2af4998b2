"""Envoy's routes and API keys, which may change while it runs.

Envoy polls them twice a second (the REST variant of its discovery protocol), and keeps its connections.
"""

import hashlib
import json
from collections.abc import Iterable

from trimtab_pipelines.edge_settings import EdgeSettings, JwtIssuer
from trimtab_protocol import grpc_messages
from trimtab_protocol.host_check import HostCheck
from trimtab_router.envoy.api_keys import HashedKey
from trimtab_router.envoy.bootstrap import LARGE, REQUESTS, ROUTES, SERVICES
from trimtab_router.envoy.http_filters import API, BUFFER_FILTER, KEYS_FILTER, NAMES_FILTER, VERSION_HEADER, Json
from trimtab_router.envoy.local_replies import FOREIGN_HOST_STATUS

KIND = API + "envoy.config.route.v3.RouteConfiguration"
OWN_SERVICES = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)
METHODS = tuple(grpc_messages.method_path(name) for name in grpc_messages.METHODS)
"""gRPC methods of the router, all unary."""
SECRET_HEADERS = ("authorization", "cookie", "proxy-authorization", "x-api-key")
"""Headers that Envoy has checked, and that are not forwarded."""
SERVICES_SECONDS = 300.0  # maximum duration of a health watch or a reflection stream


MAX_BUFFERED_BYTES = 2**18  # maximum size of a REST request that Envoy buffers until it is complete
_SMALL: Json = {"name": "content-length", "range_match": {"start": "0", "end": str(MAX_BUFFERED_BYTES + 1)}}
_HTTP1: Json = {"name": VERSION_HEADER, "string_match": {"exact": "HTTP/1.1"}}
_GET: Json = {"name": ":method", "string_match": {"exact": "GET"}}
_UNBUFFERED: Json = {"@type": API + "envoy.extensions.filters.http.buffer.v3.BufferPerRoute", "disabled": True}


def route_discovery_response(routes: Json) -> bytes:
    """Discovery response for Envoy. Equal routes have equal versions."""
    content = json.dumps(routes, sort_keys=True)
    version = hashlib.sha256(content.encode()).hexdigest()[:16]
    return json.dumps({"version_info": version, "type_url": KIND, "resources": [routes]}).encode()


def envoy_routes(
    settings: EdgeSettings,
    keys: Iterable[HashedKey],
    *,
    namespace: str,
    pipeline: str,
    max_seconds: float,
    host_check: HostCheck | None = None,
) -> Json:
    """Envoy's route configuration. Requests end within `max_seconds`: the router answers or refuses them earlier."""
    timeout = f"{max_seconds:.3f}s"
    to_router = {
        "cluster": REQUESTS,
        "timeout": timeout,
        "idle_timeout": timeout,  # the default would end a long request as idle
        # Retried only if nothing was sent yet: the router is being replaced, or closed an idle connection.
        "retry_policy": {
            "retry_on": "connect-failure,reset-before-request",
            "num_retries": 2,
            "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.250s"},
        },
    }
    services = {
        "cluster": SERVICES,
        "timeout": "0s",
        "max_stream_duration": {"max_stream_duration": f"{SERVICES_SECONDS:.0f}s"},
    }
    streaming = {"typed_per_filter_config": {BUFFER_FILTER: _UNBUFFERED}}
    without_length = {"response_headers_to_remove": ["content-length"]}
    host: Json = {
        "name": ROUTES,
        "domains": ["*"],
        "request_headers_to_remove": [*SECRET_HEADERS, VERSION_HEADER],
        "routes": [
            # gRPC calls are buffered. Over HTTP/2 the largest are reset if memory runs short; over HTTP/1.1 their total
            # would be unbounded.
            {
                "match": {"prefix": "/", "grpc": {}, "headers": [_HTTP1]},
                "direct_response": {"status": 505},
                **streaming,
            },
            *({"match": {"prefix": prefix, "grpc": {}}, "route": services, **streaming} for prefix in OWN_SERVICES),
            *({"match": {"path": path, "grpc": {}}, "route": to_router, **without_length} for path in METHODS),
            # Replies UNIMPLEMENTED at once, even if the client's stream never ends.
            {"match": {"prefix": "/", "grpc": {}}, "direct_response": {"status": 404}, **streaming},
            # Rejects tunnels at once, because their bodies have no end.
            {"match": {"connect_matcher": {}}, "direct_response": {"status": 405}, **streaming},
            {"match": {"prefix": "/", "headers": [_SMALL]}, "route": to_router},
            {"match": {"prefix": "/", "headers": [_GET]}, "route": to_router, **streaming},
            # Large requests are not buffered: over HTTP/1.1 their total would be unbounded. The router reserves memory
            # as they arrive.
            {"match": {"prefix": "/"}, "route": to_router | {"cluster": LARGE}, **streaming},
        ],
    }
    if settings.authenticates:
        table = {
            "@type": API + "envoy.extensions.filters.http.lua.v3.LuaPerRoute",
            "filter_context": _lookup_table(settings, keys, namespace, pipeline),
        }
        host["typed_per_filter_config"] = {KEYS_FILTER: table, NAMES_FILTER: table}
    routes: Json = {"@type": KIND, "name": ROUTES, "virtual_hosts": [host]}
    if host_check is not None and host_check.hosts:
        _refuse_other_hosts(routes, host, host_check)
    return routes


def _refuse_other_hosts(routes: Json, host: Json, host_check: HostCheck) -> None:
    refusal: Json = {
        "direct_response": {"status": FOREIGN_HOST_STATUS},
        "typed_per_filter_config": {BUFFER_FILTER: _UNBUFFERED},
    }
    own_origin = {"safe_regex": {"regex": host_check.origin_pattern}}
    foreign_origin = {"name": "origin", "string_match": own_origin, "invert_match": True}
    host["domains"] = list(host_check.hosts)
    host["routes"].insert(0, {"match": {"prefix": "/", "headers": [foreign_origin]}, **refusal})
    other: Json = {"name": "other", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, **refusal}]}
    routes["virtual_hosts"].append(other)
    routes["ignore_port_in_host_matching"] = True


def _lookup_table(settings: EdgeSettings, keys: Iterable[HashedKey], namespace: str, pipeline: str) -> Json:
    table: Json = {f"sha256:{key.digest}": ("+" if key.may_call(pipeline) else "-") + key.client for key in keys}
    table |= {f"issuer:{issuer.issuer}": _issuer_entry(issuer, namespace, pipeline) for issuer in settings.jwt}
    return table | {"keys": bool(settings.keys_file or settings.keys_secret), "tokens": bool(settings.jwt)}


def _issuer_entry(issuer: JwtIssuer, namespace: str, pipeline: str) -> Json:
    """Claims of an issuer's tokens that name the client and its pipelines, and the names that mean this pipeline.

    An issuer's tokens are valid in all namespaces, where two tenants may have pipelines of the same name. Client names
    are prefixed by issuer, because two issuers may use the same name. The prefix is a digest, so that adding an issuer
    changes no other prefix.
    """
    digest = hashlib.sha256(issuer.issuer.encode()).hexdigest()
    entry: Json = {"client": issuer.client_claim, "prefix": f"token:{digest[:8]}:"}
    if issuer.pipelines_claim:
        names = ["*", f"{namespace}/*", f"{namespace}/{pipeline}", *([pipeline] if issuer.unprefixed_pipelines else [])]
        entry |= {"pipelines": issuer.pipelines_claim, "named": dict.fromkeys(names, True)}
    return entry
