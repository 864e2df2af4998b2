"""API keys in a Kubernetes Secret."""

import asyncio
import base64
from collections.abc import Sequence

from trimtab_kubernetes import Cluster
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key
from trimtab_router.envoy.key_watcher import watch_secret


def a_secret(namespace: str, **keys: str) -> dict[str, object]:
    data = {
        client: base64.b64encode(format_entry(HashedKey(client, key_digest(key))).encode()).decode()
        for client, key in keys.items()
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "trimtab-keys", "namespace": namespace},
        "data": data,
    }


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
