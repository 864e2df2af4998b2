"""TLS identities of replicas: wrong ones get no batches, the others serve."""

import pytest

from tests.router.envoy.openssl import Authority, Holder
from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol.mutual_tls import MutualTls

PIPELINE = a_pipeline(1)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "ca").begin()


def showing(holder: Holder, name: str, asked: str = "") -> FakeReplica:
    return FakeReplica(name=name, tls=MutualTls(holder.identity(asked)).server_context())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("of another authority", "its certificate is refused: "),
        ("expired", "its certificate is refused: certificate has expired"),
        ("of another name", "elsewhere"),
        ("plain", "TLS"),
        ("taking others only", "closed the connection"),
    ],
)
async def test_replica_with_wrong_identity_gets_no_batches(tmp_path, authority, caplog, kind, reason):
    other = Authority(tmp_path / "other", "other").begin()
    mine = Holder(tmp_path / "mine").take(authority, authority)
    signer = other if kind == "of another authority" else authority
    names = "DNS:elsewhere" if kind == "of another name" else "DNS:shared"
    theirs = Holder(tmp_path / "theirs").take(
        signer, other if kind == "taking others only" else authority, names, expired=kind == "expired"
    )
    refused = FakeReplica(name="refused") if kind == "plain" else showing(theirs, "refused")
    good = showing(mine, "good", "shared")
    edge = EdgeSettings(replicas=mine.identity("shared"))
    async with a_rig(PIPELINE, {"stage-0": [good, refused]}, edge=edge, ready=False) as rig:
        await rig.until_ready()
        await rig.until(lambda: rig.value("trimtab_unauthenticated_replicas") == 1)
        for _ in range(8):
            assert (await rig.rest(a_request()))[0] == 200
        _, state = await rig.get("/trimtab/v1/state")
        body = state["stages"]["stage-0"]["endpoints"]
        assert (body["good"]["ready"], body["good"]["rejection"]) == (True, "")
        assert not body["refused"]["ready"]
        assert reason in body["refused"]["rejection"]
        assert not refused.seen
        assert not refused.probes
        lines = [line for line in caplog.messages if "rejected" in line]
        assert lines == [f"replica refused rejected: {body['refused']['rejection']}"]


async def test_a_refused_replica_serves_once_its_certificate_is_right(tmp_path, authority):
    mine = Holder(tmp_path / "mine").take(authority, authority)
    theirs = Holder(tmp_path / "theirs").take(authority, authority, expired=True)
    async with a_rig(
        PIPELINE, {"stage-0": [showing(theirs, "late")]}, edge=EdgeSettings(replicas=mine.identity()), ready=False
    ) as rig:
        await rig.until(lambda: rig.value("trimtab_unauthenticated_replicas") == 1)
        theirs.take(authority, authority)
        await rig.until_ready()
        assert rig.value("trimtab_unauthenticated_replicas") == 0
        assert (await rig.rest(a_request()))[0] == 200
