"""Envoy's HTTP filters: authentication, authorization, rate limits and size limits."""

from importlib.resources import files
from math import ceil
from typing import Any

from trimtab_pipelines.edge_settings import ClientLimits, EdgeSettings, JwtIssuer
from trimtab_protocol.extensions import CLIENT_HEADER, REASON_HEADER, STAGE_HEADER

Json = dict[str, Any]

API = "type.googleapis.com/"
KEYS_FILTER, NAMES_FILTER = "trimtab.keys", "trimtab.names"
BUFFER_FILTER = "envoy.filters.http.buffer"
VERSION_HEADER = "x-trimtab-http"  # HTTP version, for route matching only: removed before requests are forwarded
_TOKENS_FILTER = "envoy.filters.http.jwt_authn"
_CLAIMS = "claims"
_JWKS_CACHE_SECONDS = 5
_BURST_SECONDS = 2.0
_FILL_SECONDS = 0.2  # shortest interval of a fill: Envoy rounds to milliseconds, an error of at most 0.25 %
_MAX_CLIENTS = 10_000


def typed(name: str, kind: str, **fields: Any) -> Json:
    return {"name": name, "typed_config": {"@type": API + kind, **fields}}


def address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def static_cluster(name: str, address: Json, **more: Any) -> Json:
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    assignment = {"cluster_name": name, "endpoints": endpoints}
    return {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment, **more}


def chain(settings: EdgeSettings, max_payload_bytes: int) -> list[Json]:
    steps = [_own_headers()]
    if settings.authenticates:
        steps.append(_script(KEYS_FILTER, "keys.lua"))
        if settings.jwt:
            steps.append(_tokens(settings.jwt))
        steps.append(_script(NAMES_FILTER, "tokens.lua"))
    if settings.clients.requests_per_second:
        steps.append(_rate(settings.clients))
    size = {"max_request_bytes": max_payload_bytes}
    steps += [
        typed(
            "envoy.filters.http.body_size_limit",
            "envoy.extensions.filters.http.body_size_limit.v3.BodySizeLimit",
            **size,
        ),
        # Buffers slow uploads, so that the router receives whole requests.
        typed(BUFFER_FILTER, "envoy.extensions.filters.http.buffer.v3.Buffer", **size),
        typed(
            "envoy.filters.http.router",
            "envoy.extensions.filters.http.router.v3.Router",
            suppress_envoy_headers=True,
            respect_expected_rq_timeout=False,
        ),
    ]
    return steps


def protocol_version_filter() -> Json:
    """Set the header with the HTTP version, whatever the client sent."""
    version = {"key": VERSION_HEADER, "value": "%PROTOCOL%"}
    return typed(
        "envoy.http.early_header_mutation.header_mutation",
        "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        mutations=[{"append": {"header": version, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}],
    )


def issuer_name(number: int) -> str:
    return f"issuer-{number}"


def _own_headers() -> Json:
    """Set the client header to the client's address, and remove headers that only the proxy may set.

    An IPv6 client is a /64 network: one machine has as many addresses as it likes. An IPv4 client is an address, a /32.
    """
    client = {"key": CLIENT_HEADER, "value": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT(64)%"}
    mutations = [
        {"remove": STAGE_HEADER},
        {"remove": REASON_HEADER},
        {"append": {"header": client, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}},
    ]
    return typed(
        "envoy.filters.http.header_mutation",
        "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
        mutations={"request_mutations": mutations},
    )


def _script(name: str, file: str) -> Json:
    script = files("trimtab_router.envoy").joinpath(file).read_text()
    return typed(name, "envoy.extensions.filters.http.lua.v3.Lua", default_source_code={"inline_string": script})


def _tokens(issuers: tuple[JwtIssuer, ...]) -> Json:
    """Verify a JWT if there is one. The Lua filters require a token or a key."""
    requirements: list[Json] = [{"provider_name": issuer_name(number)} for number in range(len(issuers))]
    rule = {
        "match": {"prefix": "/"},
        "requires": {"requires_any": {"requirements": [*requirements, {"allow_missing": {}}]}},
    }
    return typed(
        _TOKENS_FILTER,
        "envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication",
        providers={issuer_name(number): _provider(number, issuer) for number, issuer in enumerate(issuers)},
        rules=[rule],
    )


def _provider(number: int, issuer: JwtIssuer) -> Json:
    is_file = not issuer.jwks.startswith("https://")
    return {
        "issuer": issuer.issuer,
        "audiences": list(issuer.audiences),
        "from_headers": [{"name": "authorization", "value_prefix": "Bearer "}],
        "forward": False,
        "payload_in_metadata": _CLAIMS,
        "require_expiration": True,
        "remote_jwks": {
            "http_uri": {
                "uri": f"http://control/jwks/{number}" if is_file else issuer.jwks,
                "cluster": "control" if is_file else issuer_name(number),
                "timeout": "5s",
            },
            # A file may change at any time. A remote issuer is polled less often.
            "cache_duration": f"{_JWKS_CACHE_SECONDS if is_file else 300}s",
            "async_fetch": {"fast_listener": True, "failed_refetch_duration": "1s"},
        },
    }


def _rate(limits: ClientLimits) -> Json:
    """Token bucket per client, created on demand. The least recently used is discarded."""
    rate = limits.requests_per_second
    burst = limits.burst or max(round(rate * _BURST_SECONDS), 1)
    tokens = max(ceil(rate * _FILL_SECONDS), 1)
    bucket = {"max_tokens": burst, "tokens_per_fill": tokens, "fill_interval": f"{tokens / rate:.3f}s"}
    unlimited = {"max_tokens": 4_000_000_000, "tokens_per_fill": 4_000_000_000, "fill_interval": "1s"}
    return typed(
        "envoy.filters.http.local_ratelimit",
        "envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit",
        stat_prefix="clients",
        token_bucket=unlimited,
        filter_enabled={"default_value": {"numerator": 100}},
        filter_enforced={"default_value": {"numerator": 100}},
        rate_limited_as_resource_exhausted=True,
        rate_limits=[{"actions": [{"request_headers": {"header_name": CLIENT_HEADER, "descriptor_key": "client"}}]}],
        descriptors=[{"entries": [{"key": "client"}], "token_bucket": bucket}],
        max_dynamic_descriptors=_MAX_CLIENTS,
        always_consume_default_token_bucket=False,
    )
