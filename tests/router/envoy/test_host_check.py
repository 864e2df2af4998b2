"""Requests of web pages, at a real Envoy, at plain REST and at the admin port on loopback."""

from typing import Any

import grpc
import pytest

from tests.router.envoy.http_clients import JSON_BODY, PATH, call
from tests.router.fakes import a_rig
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol.host_check import HostCheck
from trimtab_router.envoy.api_keys import HashedKey, key_digest
from trimtab_router.ingress.listeners import EnvoyControl

CHECK = HostCheck.at("127.0.0.1", ["models.example"])
OWN: tuple[dict[str, str], ...] = (
    {},
    {"Host": "localhost:1"},
    {"Host": "[::1]:8080"},
    {"Host": "Models.Example"},
    {"Origin": "http://localhost:3000"},
    {"Host": "localhost", "Origin": "https://models.example"},
)
FOREIGN: tuple[dict[str, str], ...] = (
    {"Host": "rebound.evil.example"},
    {"Host": "127.0.0.1.evil.example:80"},
    {"Host": "127a0b0c1"},
    {"Host": ""},
    {"Origin": "https://evil.example"},
    {"Origin": "http://localhost.evil.example"},
    {"Origin": "null"},
)


async def test_web_pages_of_other_hosts_are_refused_on_loopback() -> None:
    async with a_rig(host_check=CHECK) as rig:
        ports = await rig.proxy()
        urls = (f"http://127.0.0.1:{ports.rest_port}{PATH}", f"{rig.url}{PATH}", f"{rig.admin_url}/metrics")
        for url in urls:
            for headers in (*OWN, *FOREIGN):
                method, body = ("GET", None) if url.endswith("/metrics") else ("POST", JSON_BODY)
                async with rig.session.request(method, url, data=body, headers=headers) as answer:
                    refused = headers in FOREIGN
                    assert answer.status == (403 if refused else 200), (url, headers)
                    assert answer.headers.get("x-trimtab-reason") == ("Forbidden" if refused else None)
                    assert not refused or "on loopback only requests for" in (await answer.json())["error"]

        options = [("grpc.default_authority", "evil.example")]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}", options) as channel:
            assert (await call(rig, channel=channel)).startswith("PERMISSION_DENIED: on loopback only requests for")
        assert await call(rig) == "OK"


@pytest.mark.parametrize(
    ("address", "edge", "checks"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("0.0.0.0", {}, False),
        ("127.0.0.1", {"keysFile": "/keys"}, False),
        ("127.0.0.1", {"tls": {"certificate": "/tls.crt", "key": "/tls.key"}}, False),
    ],
)
def test_hosts_are_checked_on_loopback_without_keys(address: str, edge: dict[str, Any], *, checks: bool) -> None:
    settings, check = EdgeSettings.model_validate(edge), HostCheck.at(address)
    control = EnvoyControl(settings, namespace="default", pipeline="sample", max_seconds=60.0, host_check=check)
    control.use_keys([HashedKey("alice", key_digest("a"))])

    assert (b'"domains": ["127.0.0.1", "localhost", "[::1]"]' in control.routes) == checks
