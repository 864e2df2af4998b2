"""TLS at a real Envoy: certificate rotation, client certificates and old protocols."""

import asyncio
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import grpc
import pytest

from tests.builders import a_plan
from tests.router.envoy.http_clients import code, post, trusting
from tests.router.envoy.openssl import Authority, contents, mount
from tests.router.fakes import FakeReplica, a_pipeline, a_rig
from trimtab_pipelines.documents import dump_yaml, write_json
from trimtab_pipelines.edge_settings import EdgeSettings, EdgeTls

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
    async with a_rig(PIPELINE, {"stage-0": [FakeReplica()]}, edge=EdgeSettings(tls=tls_of(folder))) as rig:
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
    async with a_rig(PIPELINE, {"stage-0": [FakeReplica()]}, edge=settings) as rig:
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
