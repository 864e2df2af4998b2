"""Envoy as TLS terminator of a third-party server."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.ports import held_port
from tests.router.envoy.identities import Holder
from tests.router.envoy.openssl import Authority
from tests.router.envoy.test_tls import serial
from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig, endpoints_of
from trimtab_pipelines.edge_settings import EdgeSettings, ReplicaIdentity
from trimtab_protocol.http_client import ConnectionLost, HttpConnection, request_head
from trimtab_protocol.mutual_tls import MutualTls
from trimtab_router.envoy.certificates import certificate_files, terminator_bootstrap
from trimtab_router.envoy.process import command, find_binary


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
    pipeline, served = a_pipeline(1), await FakeReplica().start()
    async with guarding(served, theirs.identity("shared"), tmp_path) as port:
        endpoints = endpoints_of({"stage-0": [FakeReplica(port=port)]})
        async with a_rig(
            pipeline, {"stage-0": []}, edge=EdgeSettings(replicas=right.identity("shared")), ready=False
        ) as rig:
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
        async with a_rig(pipeline, {"stage-0": []}, edge=EdgeSettings(replicas=wrong.identity()), ready=False) as rig:
            rig.router.apply_endpoints(endpoints)
            await rig.until(lambda: rig.value("trimtab_unauthenticated_replicas") == 1)
        plain = await HttpConnection.open("127.0.0.1", port)
        with pytest.raises(ConnectionLost):
            await plain.exchange(request_head("GET", "/v2/models/small/ready", "x", {}, 0))
        assert (served.probes, len(served.seen)) == (probes, 2)
    await served.stop()
