"""TLS at a real Envoy, in front of a third-party server, and between a router and its replicas."""

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest

from tests.builders import a_plan
from tests.processes import held_port
from tests.router.envoy.http_clients import code, post, trusting
from tests.router.envoy.openssl import Authority, Holder, contents, mount
from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig, endpoints_of
from trimtab_pipelines.documents import dump_yaml, write_json
from trimtab_pipelines.edge_settings import EdgeSettings, EdgeTls, ReplicaIdentity
from trimtab_protocol.http_client import ConnectionLost, HttpConnection, request_head
from trimtab_protocol.mutual_tls import MutualTls, expiration_time
from trimtab_router.envoy.certificates import certificate_files, terminator_bootstrap
from trimtab_router.envoy.process import command, find_binary
from trimtab_router.watchers.certificate_watcher import watch_certificates

PIPELINE = a_pipeline(1)
PAIR = ("tls.crt", "tls.key")


def tls_of(folder: Path, **changes: str) -> EdgeTls:
    return EdgeTls(certificate=str(folder / PAIR[0]), key=str(folder / PAIR[1]), **changes)


def secure_channel(port: int, authority: Path, *pair: Path) -> grpc.aio.Channel:
    key, certificate = (pair[1].read_bytes(), pair[0].read_bytes()) if pair else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.read_bytes(), key, certificate)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    return grpc.aio.secure_channel(f"localhost:{port}", credentials, options=options)


async def serial(port: int, trusts: ssl.SSLContext) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusts)
    found = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return str(found)


@pytest.mark.parametrize("by", ["moved files", "a mounted Secret"])
async def test_certificate_rotation_fails_no_request(tmp_path, by):
    authority, folder, made = Authority(tmp_path / "ca").begin(), tmp_path / "tls", tmp_path / "made"
    made.mkdir()

    def put(generation: int) -> None:
        authority.issue(f"door-{generation}", made / PAIR[0], made / PAIR[1])
        if by == "a mounted Secret":
            mount(folder, contents(made, PAIR), generation)
        else:
            folder.mkdir(exist_ok=True)
            for name in PAIR:
                shutil.copy(made / name, folder / f".{name}")
                (folder / f".{name}").replace(folder / name)

    put(0)
    trusts = trusting(authority.file)
    async with a_rig(edge=EdgeSettings(tls=tls_of(folder))) as rig:
        ports = await rig.proxy()
        async with aiohttp.ClientSession() as kept:
            for generation in (1, 2):
                before = await serial(ports.rest_port, trusts)
                put(generation)
                async with asyncio.timeout(20):
                    for port in (ports.rest_port, ports.grpc_port):
                        while await serial(port, trusts) == before:
                            assert (await post(rig, tls=trusts, session=kept)).status == 200
                async with secure_channel(ports.grpc_port, authority.file) as channel:
                    assert await code(rig, channel=channel) == "OK"
                assert (await post(rig, tls=trusts)).status == 200


async def test_client_without_valid_certificate_cannot_connect(tmp_path):
    ours, theirs = Authority(tmp_path / "ours").begin(), Authority(tmp_path / "theirs", "theirs").begin()
    folder = tmp_path / "tls"
    folder.mkdir()
    ours.issue("door", folder / PAIR[0], folder / PAIR[1])
    pairs = {}
    for authority in (ours, theirs):
        pairs[authority] = (authority.folder / "caller.crt", authority.folder / "caller.key")
        authority.issue("caller", *pairs[authority])
    settings = EdgeSettings(tls=tls_of(folder, client_ca=str(ours.file)))
    async with a_rig(edge=settings) as rig:
        ports = await rig.proxy()
        assert (await post(rig, tls=trusting(ours.file, *pairs[ours]))).status == 200
        async with secure_channel(ports.grpc_port, ours.file, *pairs[ours]) as channel:
            assert await code(rig, channel=channel) == "OK"
        for pair in ((), pairs[theirs]):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await post(rig, tls=trusting(ours.file, *pair))
            async with secure_channel(ports.grpc_port, ours.file, *pair) as channel:
                assert await code(rig, channel=channel) == "UNAVAILABLE"
        with pytest.raises(aiohttp.ClientError):
            await post(rig)


@pytest.mark.parametrize(
    ("spoilt", "body"),
    [("tls.crt", "tls.crt"), ("tls.key", "tls.key"), ("missing", "No such file"), ("callers.crt", "clientCa")],
)
def test_unusable_certificates_prevent_the_start(tmp_path, spoilt, body):
    authority = Authority(tmp_path).begin()
    authority.issue("door", tmp_path / PAIR[0], tmp_path / PAIR[1])
    callers_file = tmp_path / "callers.crt"
    shutil.copy(authority.file, callers_file)
    if spoilt == "missing":
        (tmp_path / PAIR[0]).unlink()
    else:
        (tmp_path / spoilt).write_text("spoilt")
    settings = EdgeSettings(tls=tls_of(tmp_path, client_ca=str(callers_file)))
    (tmp_path / "edge.yaml").write_text(dump_yaml(settings))
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(PIPELINE))
    write_json(tmp_path / "plan.json", a_plan(PIPELINE))
    arguments = ["--pipeline", str(tmp_path / "pipeline.yaml"), "--edge", str(tmp_path / "edge.yaml")]
    ran = subprocess.run(
        [sys.executable, "-m", "trimtab_router.envoy", *arguments, "--sockets", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("trimtab_router.envoy: tls: ")
    assert body in ran.stderr
    assert "Traceback" not in ran.stderr


@asynccontextmanager
async def guarding(served: FakeReplica, identity: ReplicaIdentity, folder: Path) -> AsyncIterator[int]:
    for name, content in certificate_files(identity).items():
        (folder / name).write_text(json.dumps(content))
    with held_port() as port:
        config = terminator_bootstrap(identity, port=port, served_port=served.port, folder=folder)
        arguments = command(find_binary(), "--config-yaml", json.dumps(config))
        process = await asyncio.create_subprocess_exec(*arguments, stderr=subprocess.DEVNULL)
        try:
            while True:
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)  # Envoy does not say when it listens
            yield port
        finally:
            process.terminate()
            await process.wait()


async def test_terminator_admits_only_the_named_certificate(tmp_path):
    authority = Authority(tmp_path / "ca").begin()
    theirs = Holder(tmp_path / "theirs", mounted=True).take(authority, authority)
    right = Holder(tmp_path / "right").take(authority, authority)
    wrong = Holder(tmp_path / "wrong").take(authority, authority, "DNS:elsewhere")
    served = await FakeReplica().start()
    async with guarding(served, theirs.identity("shared"), tmp_path) as port:
        endpoints = endpoints_of({"stage-0": [FakeReplica(port=port)]})
        edge = EdgeSettings(replicas=right.identity("shared"))
        async with a_rig(PIPELINE, {"stage-0": []}, edge=edge, ready=False) as rig:
            rig.router.apply_endpoints(endpoints)
            await rig.until_ready()
            assert (await rig.rest(a_request()))[0] == 200
            shown = MutualTls(right.identity()).client_context()
            before = await serial(port, shown)
            theirs.take(authority, authority)
            while await serial(port, shown) == before:  # noqa: ASYNC110 - Envoy does not say when it has them
                await asyncio.sleep(0.05)
            assert (await rig.rest(a_request()))[0] == 200
        probes = served.probes
        async with a_rig(PIPELINE, {"stage-0": []}, edge=EdgeSettings(replicas=wrong.identity()), ready=False) as rig:
            rig.router.apply_endpoints(endpoints)
            await rig.until(lambda: rig.value("trimtab_unauthenticated_replicas") == 1)
        plain = await HttpConnection.open("127.0.0.1", port)
        with pytest.raises(ConnectionLost):
            await plain.exchange(request_head("GET", "/v2/models/small/ready", "x", {}, 0))
        assert (served.probes, len(served.seen)) == (probes, 2)
    await served.stop()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "ca").begin()


def showing(holder: Holder, name: str, asked: str = "") -> FakeReplica:
    return FakeReplica(name=name, tls=MutualTls(holder.identity(asked)).server_context())


async def test_certificates_are_reported_before_they_expire(tmp_path, authority, caplog):
    name, holder = (
        "trimtab_certificate_expiration_timestamp_seconds",
        Holder(tmp_path / "mine").take(authority, authority),
    )
    edge = EdgeSettings(tls=tls_of(tmp_path / "mine"), replicas=holder.identity())
    async with a_rig(PIPELINE, {"stage-0": [showing(holder, "one")]}, edge=edge) as rig:
        await rig.proxy()
        watch = asyncio.create_task(watch_certificates(rig.router.metrics, edge, rig.listeners.envoy))
        await rig.until(lambda: all(rig.value(name, certificate=each) for each in ("proxy", "replicas")))
        watch.cancel()
        expiration_times = {rig.value(name, certificate=each) for each in ("proxy", "replicas")}
    assert expiration_times == {expiration_time((tmp_path / "mine" / PAIR[0]).read_text())}
    for certificate in ("proxy", "replicas"):
        assert f"the certificate for {certificate} expires in 2.0 days; renew it" in caplog.messages


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
    trusted = other if kind == "taking others only" else authority
    theirs = Holder(tmp_path / "theirs").take(signer, trusted, names, expired=kind == "expired")
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
    replica, edge = showing(theirs, "late"), EdgeSettings(replicas=mine.identity())
    async with a_rig(PIPELINE, {"stage-0": [replica]}, edge=edge, ready=False) as rig:
        await rig.until(lambda: rig.value("trimtab_unauthenticated_replicas") == 1)
        theirs.take(authority, authority)
        await rig.until_ready()
        assert rig.value("trimtab_unauthenticated_replicas") == 0
        assert (await rig.rest(a_request()))[0] == 200
