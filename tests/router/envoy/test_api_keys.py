"""API keys at a real Envoy: valid, unknown, revoked and missing keys, and keys in a Kubernetes Secret."""

import asyncio
import base64
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDictProxy

from tests.router.envoy.http_clients import PATH, a_fake_router, call, code, post
from tests.router.envoy.openssl import replace
from tests.router.fakes import FakeReplica, Rig, a_pipeline, a_rig
from trimtab_kubernetes import Cluster
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_router.envoy.api_keys import ALL, HashedKey, format_entry, key_digest, new_key
from trimtab_router.envoy.key_watcher import watch_secret

PIPELINE = a_pipeline(1)


def line(client: str, key: str, *pipelines: str) -> str:
    return f"{client}: {format_entry(HashedKey(client, key_digest(key), frozenset(pipelines or {ALL})))}\n"


def settings(file: Path) -> EdgeSettings:
    return EdgeSettings(keys_file=str(file))


async def until_status(rig: Rig, status: int, *headers: tuple[str, str]) -> None:
    async with asyncio.timeout(30):
        while (await post(rig, *headers)).status != status:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)


async def test_only_requests_with_a_valid_key_pass(tmp_path):
    keys, alice, other = tmp_path / "keys", new_key(), new_key()
    keys.write_text(line("alice", alice, "sample") + line("bob", other, "another"))
    replica = FakeReplica()
    async with a_rig(PIPELINE, {"stage-0": [replica]}, edge=settings(keys)) as rig:
        for shown in (
            ("X-API-Key", alice),
            ("Authorization", f"Bearer {alice}"),
            ("Authorization", f"bearer {alice}"),
            ("Authorization", f"BEARER  {alice}"),
        ):
            assert (await post(rig, shown)).status == 200, shown
            assert await call(rig, (shown[0].lower(), shown[1])) == "OK"
        assert len(replica.seen) == 8
        for headers in (
            (),
            (("X-API-Key", new_key()),),
            (("X-API-Key", ""),),
            (("X-API-Key", "+alice"),),
            (("X-API-Key", f"sha256:{key_digest(alice)}"),),
            (("X-API-Key", key_digest(alice)),),
            (("X-API-Key", alice + "x"),),
            (("X-API-Key", alice), ("X-API-Key", alice)),
            (("X-API-Key", new_key()), ("X-API-Key", alice)),
            (("Authorization", alice),),
            (("Authorization", f"Basic {alice}"),),
            (("Authorization", f"Bearer {alice}"), ("Authorization", f"Bearer {alice}")),
            (("Authorization", f"Bearer {alice} {alice}"),),
            (("Authorization", "Bearer a.b.c"),),
            (("X-Trimtab-Client", "key:alice"),),
            (("Cookie", f"x-api-key={alice}"),),
            (("X-API-Key", new_key()), ("Authorization", f"Bearer {alice}")),
        ):
            refused = await post(rig, *headers)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer"), headers
            assert refused.headers["x-trimtab-reason"] == "Unauthenticated"
            assert "X-API-Key" in refused.error
            assert await code(rig, *((name.lower(), value) for name, value in headers)) == "UNAUTHENTICATED", headers
        for name in ("x-api-key", "access_token", "key"):
            assert (await post(rig, path=f"{PATH}?{name}={alice}")).status == 401, name
        assert (await post(rig, body=io.BytesIO(bytes(2**20)))).status == 401
        assert rig.router.admission.memory.bytes_in_flight == 0, "the body of a request without a key is not read"
        forbidden = await post(rig, ("X-API-Key", other))
        assert (forbidden.status, forbidden.headers["x-trimtab-reason"]) == (403, "Forbidden")
        assert forbidden.error == "this client may not call this pipeline"
        assert (await call(rig, ("x-api-key", other))).startswith("PERMISSION_DENIED: this client may not")
        assert len(replica.seen) == 8


async def test_health_and_reflection_require_a_key(tmp_path):
    keys, key = tmp_path / "keys", new_key()
    keys.write_text(line("alice", key))
    async with a_rig(edge=settings(keys)) as rig:
        base = f"http://127.0.0.1:{(await rig.proxy()).rest_port}"
        for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/sample", "/nothing", "//v2/health/live"):
            async with rig.session.get(base + path) as answer:
                assert answer.status == 401, path
            async with rig.session.get(base + path, headers={"x-api-key": key}) as answer:
                assert answer.status == (404 if path == "/nothing" else 200), path
        async with rig.session.options(base + "/v2") as answer:
            assert answer.status == 401
        for path in ("/metrics", "/trimtab/v1/state", "/trimtab/v1/arrivals"):
            async with rig.session.get(base + path, headers={"x-api-key": key}) as answer:
                assert answer.status == 404, path


@pytest.mark.parametrize("asked", [True, False])
async def test_secrets_and_forged_client_names_are_removed(asked):
    key = new_key()
    heads: list[CIMultiDictProxy[str]] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        heads.append(request.headers)
        return web.Response(text="{}")

    known = HashedKey("alice", key_digest(key))
    asking = EdgeSettings(keys_file="/somewhere") if asked else EdgeSettings()
    async with a_fake_router(answer, asking, [known]) as ports, aiohttp.ClientSession() as session:
        for shown in (
            [("X-API-Key", key), ("Authorization", "Basic c2VjcmV0")],
            [("Authorization", f"Bearer {key}")],
            [("X-API-Key", key), ("Cookie", "session=1"), ("Proxy-Authorization", "Basic c2VjcmV0")],
        ):
            own = [("X-Trimtab-Client", "key:mallory"), ("x-trimtab-client", "key:mallory"), ("x-request-id", "mine")]
            async with session.get(f"http://127.0.0.1:{ports.rest_port}/v2", headers=[*shown, *own]) as answered:
                assert answered.status == 200
    assert len(heads) == 3
    for head in heads:
        assert head.getall("x-trimtab-client") == ["key:alice" if asked else "127.0.0.1/32"]
        assert head["x-request-id"] == "mine"
        assert not {"authorization", "x-api-key", "cookie", "proxy-authorization"} & {name.lower() for name in head}
        assert key not in str(head)


async def test_a_revoked_key_is_refused_while_connections_stay(tmp_path):
    keys, alice, bob = tmp_path / "keys", new_key(), new_key()
    keys.write_text(line("alice", alice) + line("bob", bob))
    connections: list[object] = []

    async def note(*_: object) -> None:
        connections.append(1)

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_end.append(note)
    async with (
        a_rig(edge=settings(keys)) as rig,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), trace_configs=[tracing]) as session,
    ):
        await until_status(rig, 200, ("x-api-key", bob))
        replace(keys, line("alice", alice))
        async with asyncio.timeout(5):
            while (await post(rig, ("x-api-key", bob))).status != 401:
                assert (await post(rig, ("x-api-key", alice), session=session)).status == 200
                assert await code(rig, ("x-api-key", alice)) == "OK"
        assert (await post(rig, ("x-api-key", alice), session=session)).status == 200
        assert len(connections) == 1


async def test_key_file_rewritten_in_place_is_reloaded(tmp_path):
    keys, alice, bob = tmp_path / "keys", new_key(), new_key()
    keys.write_text("nonsense\nmallory: a plain key\n" + line("alice", alice) + line("bob", bob))
    async with a_rig(edge=settings(keys)) as rig:
        await until_status(rig, 200, ("x-api-key", bob))
        keys.write_text("sha256:\n" + line("alice", alice) + "bob: sha256:revoked\n\0\ufffd: x\n")
        await until_status(rig, 401, ("x-api-key", bob))
        assert (await post(rig, ("x-api-key", alice))).status == 200
        keys.unlink()
        await until_status(rig, 401, ("x-api-key", alice))
        assert await code(rig, ("x-api-key", alice)) == "UNAUTHENTICATED"
        keys.write_text(line("alice", alice))
        await until_status(rig, 200, ("x-api-key", alice))


async def test_keys_of_every_length_are_known_by_their_hash(tmp_path):
    """The filter's own SHA-256 is the standard's, around every border of its blocks, up to the longest key taken."""
    keys = tmp_path / "keys"
    lengths = [*range(1, 131), 183, 184, 191, 192, 247, 248, 255, 256]
    shown = {length: "".join(chr(33 + (length * 7 + i * 11) % 94) for i in range(length)) for length in lengths}
    too_long = "x" * 257
    hashed = (f"client{n}: sha256:{hashlib.sha256(key.encode()).hexdigest()}\n" for n, key in shown.items())
    keys.write_text("".join(hashed) + line("long", too_long))
    async with a_rig(edge=settings(keys)) as rig:
        url = f"http://127.0.0.1:{(await rig.proxy()).rest_port}/v2"
        for length, key in shown.items():
            async with rig.session.get(url, headers={"x-api-key": key}) as answer:
                assert answer.status == 200, length
            async with rig.session.get(url, headers={"x-api-key": key[:-1] + " "}) as answer:
                assert answer.status == 401, length
        async with rig.session.get(url, headers={"x-api-key": too_long}) as answer:
            assert answer.status == 401


async def test_without_keys_every_request_is_refused(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(line("alice", key := new_key()))
    async with a_rig(edge=settings(keys)) as rig:
        await until_status(rig, 200, ("x-api-key", key))
        control = rig.control
        assert control is not None
        control.settings = EdgeSettings()
        control.use_keys(())
        await until_status(rig, 401, ("x-api-key", key))
        assert (await post(rig)).status == 401
        assert (await post(rig, ("x-trimtab-client", "key:alice"))).status == 401


def a_secret(namespace: str, **keys: str) -> dict[str, object]:
    data = {
        client: base64.b64encode(format_entry(HashedKey(client, key_digest(key))).encode()).decode()
        for client, key in keys.items()
    }
    metadata = {"name": "trimtab-keys", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


async def test_secret_keys_are_watched_and_deletion_refuses_all(cluster: Cluster, namespace: str) -> None:
    body: asyncio.Queue[list[str]] = asyncio.Queue()

    def use(keys: Sequence[HashedKey]) -> None:
        body.put_nowait([key.client for key in keys])

    following = asyncio.create_task(watch_secret(cluster, namespace, "trimtab-keys", use))
    try:
        async with asyncio.timeout(60):
            assert await body.get() == []
            alice, bob = new_key(), new_key()
            await cluster.create(a_secret(namespace, alice=alice, bob=bob), manager="tests")
            assert sorted(await body.get()) == ["alice", "bob"]
            await cluster.delete("Secret", namespace, "trimtab-keys")
            assert await body.get() == []
            await cluster.create(a_secret(namespace, alice=alice), manager="tests")
            assert await body.get() == ["alice"]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
