"""Credentials of proxies and clients in cluster runs, and results of a pod without access."""

import ssl
import stat

import pytest

from benchmarks.cluster.credentials import LOAD, Credentials
from benchmarks.cluster.trespassing import GUARDED, Met
from tests.router.envoy.openssl import Authority
from trimtab_router.envoy.api_keys import key_digest, read_secret


@pytest.fixture
def credentials(tmp_path):
    return Credentials(Authority(tmp_path).begin(), {LOAD: "tt_one", "visitor": "tt_two"})


def test_a_secret_of_keys_lets_in_those_in_force_and_tells_none(credentials):
    found = read_secret(credentials.hashed("space")["data"])
    assert {key.client: key.digest for key in found.keys} == {
        LOAD: key_digest("tt_one"),
        "visitor": key_digest("tt_two"),
    }
    assert not found.problems


def test_a_caller_gets_its_key_in_a_file_of_its_own(credentials):
    access = credentials.access("visitor")
    assert access.headers == {"x-api-key": "tt_two"}
    assert access.api_key_file is not None
    assert stat.S_IMODE(access.api_key_file.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR


async def test_each_certificate_is_another_for_the_same_address(credentials, tmp_path):
    (first, one), (second, two) = [await credentials.certificate("space", "10.0.0.7") for _ in range(2)]
    assert one != two
    assert first["data"]["tls.crt"] != second["data"]["tls.crt"]
    ssl.create_default_context().load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")


@pytest.mark.parametrize(
    ("reached", "enforced", "forbidden"),
    [((), True, set()), (("router:8082",), True, {"router:8082"}), ((GUARDED, "router:8082"), False, {"router:8082"})],
)
def test_ports_count_if_an_isolated_pod_is_unreachable(reached, enforced, forbidden):
    met = Met({"without": "401", "with": "200", "called": "OK", "plain": "RemoteDisconnected"}, frozenset(reached))
    assert met.enforced is enforced
    assert met.forbidden == forbidden
    assert met.let_in == ("with", "called")
