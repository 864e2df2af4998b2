"""Keys in a Secret of a real API server: taken as they change, and nobody's where there is none."""

import asyncio
import base64
from collections.abc import Sequence

from trimtab_kubernetes import Cluster
from trimtab_router.envoy.api_keys import HashedKey, digest_of, entry_of, new_key
from trimtab_router.envoy.key_watcher import follow_secret


def a_secret(namespace: str, **keys: str) -> dict[str, object]:
    data = {
        client: base64.b64encode(entry_of(HashedKey(client, digest_of(key))).encode()).decode()
        for client, key in keys.items()
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "trimtab-keys", "namespace": namespace},
        "data": data,
    }


async def test_keys_of_a_secret_are_followed_and_without_one_nobody_gets_in(cluster: Cluster, namespace: str) -> None:
    told: asyncio.Queue[list[str]] = asyncio.Queue()

    def use(keys: Sequence[HashedKey]) -> None:
        told.put_nowait([key.client for key in keys])

    following = asyncio.create_task(follow_secret(cluster, namespace, "trimtab-keys", use))
    try:
        async with asyncio.timeout(60):
            assert await told.get() == []
            alice, bob = new_key(), new_key()
            await cluster.create(a_secret(namespace, alice=alice, bob=bob), manager="tests")
            assert sorted(await told.get()) == ["alice", "bob"]
            await cluster.delete("Secret", namespace, "trimtab-keys")
            assert await told.get() == []
            await cluster.create(a_secret(namespace, alice=alice), manager="tests")
            assert await told.get() == ["alice"]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
