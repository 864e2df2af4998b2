"""Where requests go, and by which keys: what may change while the door is open. Pure.

Envoy asks for it twice a second (the REST form of its discovery protocol) and takes a new version without touching a
connection.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from trimtab_pipelines.edge_settings import EdgeSettings, JwtIssuer
from trimtab_protocol import grpc_messages
from trimtab_router.envoy.api_keys import HashedKey
from trimtab_router.envoy.bootstrap import LARGE, REQUESTS, ROUTES, SERVICES
from trimtab_router.envoy.http_filters import API, BUFFER_FILTER, KEYS_FILTER, NAMES_FILTER, VERSION_HEADER

Json = dict[str, Any]

KIND = API + "envoy.config.route.v3.RouteConfiguration"
OWN_SERVICES = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)
METHODS = tuple(grpc_messages.method_path(name) for name in grpc_messages.METHODS)
"""What the router serves over gRPC, each with one message in and one out."""
SECRET_HEADERS = ("authorization", "cookie", "proxy-authorization", "x-api-key")
"""What the door has read, and nobody behind it needs."""
SERVICES_SECONDS = 300.0
"""How long a caller may watch health or ask for reflection in one stream."""


MOST_HELD_BYTES = 2**18
"""Of a REST request that waits at the door until it is whole."""
_SMALL: Json = {"name": "content-length", "range_match": {"start": "0", "end": str(MOST_HELD_BYTES + 1)}}
_HTTP1: Json = {"name": VERSION_HEADER, "string_match": {"exact": "HTTP/1.1"}}
_GET: Json = {"name": ":method", "string_match": {"exact": "GET"}}
_UNBUFFERED: Json = {"@type": API + "envoy.extensions.filters.http.buffer.v3.BufferPerRoute", "disabled": True}


def route_discovery_response(routes: Json) -> bytes:
    """The answer to Envoy's question for its routes; the same routes have the same version."""
    content = json.dumps(routes, sort_keys=True)
    version = hashlib.sha256(content.encode()).hexdigest()[:16]
    return json.dumps({"version_info": version, "type_url": KIND, "resources": [routes]}).encode()


def envoy_routes(
    settings: EdgeSettings, keys: Iterable[HashedKey], *, namespace: str, pipeline: str, longest_seconds: float
) -> Json:
    """Envoy's route configuration.

    Args:
        settings: what was asked of the door.
        keys: the keys in force.
        namespace: of the pipeline.
        pipeline: whose door it is.
        longest_seconds: how long a request may take; the router answers or refuses before.
    """
    timeout = f"{longest_seconds:.3f}s"
    to_router = {
        "cluster": REQUESTS,
        "timeout": timeout,
        "idle_timeout": timeout,  # else a request that rightly takes long would end as an idle one
        # Sent again only where nothing was sent yet: the router is just being replaced, or closed an idle connection.
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
    cut = {"response_headers_to_remove": ["content-length"]}
    host: Json = {
        "name": ROUTES,
        "domains": ["*"],
        "request_headers_to_remove": [*SECRET_HEADERS, VERSION_HEADER],
        "routes": [
            # Calls are held until they are whole. Over HTTP/2 the fattest are cut when memory runs short; over HTTP/1.1
            # nothing would bound what all of them hold here together.
            {
                "match": {"prefix": "/", "grpc": {}, "headers": [_HTTP1]},
                "direct_response": {"status": 505},
                **streaming,
            },
            *({"match": {"prefix": prefix, "grpc": {}}, "route": services, **streaming} for prefix in OWN_SERVICES),
            *({"match": {"path": path, "grpc": {}}, "route": to_router, **cut} for path in METHODS),
            # At once, though the caller's stream may never end: gRPC callers are told UNIMPLEMENTED.
            {"match": {"prefix": "/", "grpc": {}}, "direct_response": {"status": 404}, **streaming},
            # No tunnels; what a caller sends into one has no end, so nobody may wait for it.
            {"match": {"connect_matcher": {}}, "direct_response": {"status": 405}, **streaming},
            {"match": {"prefix": "/", "headers": [_SMALL]}, "route": to_router},
            {"match": {"prefix": "/", "headers": [_GET]}, "route": to_router, **streaming},
            # Over HTTP/1.1 nothing but the filter's own bound would limit what all of them hold here together. The
            # router takes memory for them as they come.
            {"match": {"prefix": "/"}, "route": to_router | {"cluster": LARGE}, **streaming},
        ],
    }
    if settings.authenticates:
        known = {
            "@type": API + "envoy.extensions.filters.http.lua.v3.LuaPerRoute",
            "filter_context": _known(settings, keys, namespace, pipeline),
        }
        host["typed_per_filter_config"] = {KEYS_FILTER: known, NAMES_FILTER: known}
    return {"@type": KIND, "name": ROUTES, "virtual_hosts": [host]}


def _known(settings: EdgeSettings, keys: Iterable[HashedKey], namespace: str, pipeline: str) -> Json:
    """What keys.lua and tokens.lua look up."""
    known: Json = {f"sha256:{key.digest}": ("+" if key.may_call(pipeline) else "-") + key.client for key in keys}
    known |= {f"issuer:{issuer.issuer}": _of_issuer(issuer, namespace, pipeline) for issuer in settings.jwt}
    return known | {"keys": bool(settings.keys_file or settings.keys_secret), "tokens": bool(settings.jwt)}


def _of_issuer(issuer: JwtIssuer, namespace: str, pipeline: str) -> Json:
    """Where its tokens name their client and what he may call, and which of those names mean this pipeline.

    One issuer's tokens reach all namespaces, where two tenants may each have a pipeline of one name. A client is one of
    his issuer: two may give the same name to two. Issuers have digests, not numbers, so that one more renames nobody.
    """
    found: Json = {"client": issuer.client_claim, "prefix": f"token:{_digest(issuer.issuer)}:"}
    if issuer.pipelines_claim:
        names = ["*", f"{namespace}/*", f"{namespace}/{pipeline}", *([pipeline] if issuer.unprefixed_pipelines else [])]
        found |= {"pipelines": issuer.pipelines_claim, "named": dict.fromkeys(names, True)}
    return found


def _digest(issuer: str) -> str:
    return hashlib.sha256(issuer.encode()).hexdigest()[:8]
