"""Envoy's generated configuration: equal to the golden files, and accepted by Envoy."""

import json
import os
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_pipelines.documents import DocumentError, load_edge
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_router.envoy.api_keys import (
    HashedKey,
    format_entry,
    key_digest,
    new_key,
    read_entries,
    read_file,
    read_secret,
)
from trimtab_router.envoy.bootstrap import bootstrap
from trimtab_router.envoy.certificates import discovery_files
from trimtab_router.envoy.process import find_binary
from trimtab_router.envoy.route_discovery import envoy_routes, route_discovery_response
from trimtab_router.envoy.sockets import SocketFolder, Sockets
from trimtab_router.ingress.listeners import EnvoyControl

GOLDEN = Path(__file__).parents[2] / "data" / "edge"
KEYS = (
    HashedKey("alice", key_digest("a"), frozenset({"sample"})),
    HashedKey("bob", key_digest("b"), frozenset({"other"})),
)
EVERYTHING: dict[str, Any] = {
    "tls": {"certificate": "/certificates/tls.crt", "key": "/certificates/tls.key", "clientCa": "/callers/ca.crt"},
    "keysFile": "/keys/keys",
    "jwt": [
        {"issuer": "https://one.example", "audiences": ["trimtab"], "jwks": "/issuers/one.json"},
        {
            "issuer": "https://two.example",
            "audiences": ["a", "b"],
            "jwks": "https://two.example:8443/jwks.json",
            "clientClaim": "client_id",
            "pipelinesClaim": "pipelines",
        },
    ],
    "clients": {"requestsPerSecond": 20, "burst": 50, "concurrency": 8, "inFlight": "8Mi"},
    "timeouts": {"headers": "5s", "body": "20s", "idle": "60s", "connectionAge": "600s"},
    "maxConnections": 1000,
    "maxStreams": 64,
    "trustedHops": 1,
    "accessLog": "Refused",
    "accessLogFields": ["tls_version", "certificate_subject"],
    "memory": "512Mi",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "keys": {"keysSecret": "trimtab-keys", "accessLog": "All"},
    "everything": EVERYTHING,
}


def generated(name: str, folder: Path = Path("/sockets")) -> dict[str, Any]:
    return generated_of(SETTINGS[name], folder, otlp="collector:4317" if name == "everything" else None)


def generated_of(asked: dict[str, Any], folder: Path, otlp: str | None = None) -> dict[str, Any]:
    settings = EdgeSettings.model_validate(asked)
    socket_folder = SocketFolder(Sockets(folder), "0.0.0.0", 8080, 8081)
    return {
        "bootstrap": bootstrap(settings, socket_folder, pipeline="sample", otlp=otlp),
        "routes": envoy_routes(settings, KEYS, namespace="default", pipeline="sample", max_seconds=65.0),
        "certificates": discovery_files(settings.tls) if settings.tls else {},
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_config_equals_golden_file(name):
    """`TRIMTAB_UPDATE_GOLDEN=1` updates the golden files."""
    file = GOLDEN / f"{name}.json"
    written = json.dumps(generated(name), indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("TRIMTAB_UPDATE_GOLDEN"):
        file.write_text(written)
    assert written == file.read_text()


@pytest.mark.parametrize("name", SETTINGS)
def test_envoy_accepts_the_config(name, tmp_path):
    assert_taken(generated(name, tmp_path), tmp_path)


def assert_taken(found: dict[str, Any], folder: Path) -> None:
    for file, content in found["certificates"].items():
        (folder / file).write_text(json.dumps(content))
    config = found["bootstrap"]
    routes = {key: value for key, value in found["routes"].items() if key != "@type"}
    for listener in config["static_resources"]["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        del manager["rds"]
        manager["route_config"] = routes
    (folder / "envoy.json").write_text(json.dumps(config))
    arguments = ["--mode", "validate", "--config-path", str(folder / "envoy.json"), "--log-level", "warning"]
    ran = subprocess.run([find_binary(), *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("rate_rps", [0.01, 3, 21, 29, 30, 39, 50, 59, 69, 70, 99, 130, 4567.8])
def test_token_bucket_matches_the_configured_rate(rate_rps, tmp_path):
    found = generated_of({"clients": {"requestsPerSecond": rate_rps}}, tmp_path)
    (manager,) = found["bootstrap"]["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    filters = {each["name"]: each["typed_config"] for each in manager["typed_config"]["http_filters"]}
    bucket = filters["envoy.filters.http.local_ratelimit"]["descriptors"][0]["token_bucket"]
    interval_ms = Decimal(bucket["fill_interval"].removesuffix("s")) * 1000

    assert interval_ms == int(interval_ms) >= 50, "Envoy would leave out what is less than a millisecond"
    assert 1000 * bucket["tokens_per_fill"] / float(interval_ms) == pytest.approx(rate_rps, rel=0.005)
    assert_taken(found, tmp_path)


def test_route_version_depends_on_the_routes():
    def version(*keys: HashedKey) -> str:
        routes = envoy_routes(
            EdgeSettings(keys_file="/keys"), keys, namespace="default", pipeline="sample", max_seconds=65.0
        )
        return str(json.loads(route_discovery_response(routes))["version_info"])

    assert version(*KEYS) == version(*reversed(KEYS))
    assert len({version(), version(KEYS[0]), version(*KEYS)}) == 3


def test_no_routes_are_served_before_keys_are_read():
    def served_routes(settings: EdgeSettings) -> bytes:
        return EnvoyControl(settings, namespace="default", pipeline="sample", max_seconds=65.0).routes

    assert served_routes(EdgeSettings())
    assert not served_routes(EdgeSettings(keys_file="/keys"))
    assert not served_routes(EdgeSettings(keys_secret="keys"))


@given(st.from_regex(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,62}", fullmatch=True), st.sets(st.sampled_from(["*", "a", "b-1"])))
def test_formatted_key_entry_is_parsed_again(client, pipelines):
    key = HashedKey(client, key_digest(new_key()), frozenset(pipelines) or frozenset({"*"}))
    line = f"{client}: {format_entry(key)}"
    assert read_file(f"# comment\n\n {line}  # of a client\n").keys == (key,)
    assert (key.may_call("a"), key.may_call("c")) == (bool({"*", "a"} & key.pipelines), "*" in key.pipelines)


@given(st.text(max_size=200), st.dictionaries(st.text(max_size=70), st.text(max_size=100), max_size=4))
def test_bad_entries_keep_valid_keys_and_leak_no_key(text, data):
    good = f"alice: {format_entry(KEYS[0])}"
    found = read_file(f"{good}\n{text}")
    assert KEYS[0] in found.keys
    assert all(len(key.digest) == 64 for key in found.keys)
    secret = "a-plain-key"
    assert not read_secret(data).keys
    assert secret not in str(read_entries([("bob", secret), ("a b", f"sha256:{secret}")]).problems)


@pytest.mark.parametrize(
    ("wrong", "reply"),
    [
        ({"keysFile": "/keys", "keysSecret": "keys"}, "mutually exclusive"),
        ({"tls": {"certificate": "/a/tls.crt", "key": "/b/tls.key"}}, "must be in one folder"),
        ({"tls": {"certificate": "/a/tls.crt"}}, "key"),
        ({"jwt": [{"issuer": "i", "audiences": ["a"], "jwks": "http://plain"}]}, "jwks"),
        ({"jwt": [{"issuer": "i", "audiences": [], "jwks": "/a"}]}, "audiences"),
        ({"jwt": [{"issuer": "i", "audiences": [""], "jwks": "/a"}]}, "audiences"),
        ({"jwt": [{"issuer": "i", "audiences": ["a"], "jwks": "/a"}] * 2}, "duplicate issuer i"),
        ({"clients": {"requestsPerSecond": -1}}, "requestsPerSecond"),
        ({"timeouts": {"idle": "0s"}}, "timeouts.idle"),
        ({"memory": "1Mi"}, "memory"),
        ({"accessLog": "Some"}, "accessLog"),
        ({"accessLogFields": ["body"]}, "accessLogFields"),
        ({"tlss": {}}, "tlss"),
    ],
)
def test_invalid_settings_are_named(tmp_path, wrong, reply):
    (tmp_path / "edge.yaml").write_text(json.dumps(wrong))
    with pytest.raises(DocumentError, match=reply) as refused:
        load_edge(tmp_path / "edge.yaml")
    assert "edge.yaml" in str(refused.value)
