"""One adapter at a time: a Lease says which. While the API server is away the leader goes on: nobody can take over.

Whether a lease has run out is told by our own clock, from when it was last seen to change: clocks of nodes differ.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime

from trimtab_kubernetes import Cluster, ClusterError, Conflict
from trimtab_kubernetes.client import Object
from trimtab_pipelines.cluster import ADAPTER_MANAGER

log = logging.getLogger(__name__)

LEASE_SECONDS = 10
RENEW_SECONDS = 3.0
KIND = "Lease"


class Leadership:
    """A claim to the lease of one name."""

    def __init__(self, cluster: Cluster, namespace: str, identity: str, name: str = ADAPTER_MANAGER) -> None:
        self._cluster, self._namespace, self._identity, self._name = cluster, namespace, identity, name
        self._seen: tuple[str, float] = ("", 0.0)  # version of the lease, and when it was first seen

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait until the lease is ours; False where told to stop before that."""
        said = ""
        while not stop.is_set():
            holder = await self._try()
            if holder == self._identity:
                log.info("leading as %s", self._identity)
                return True
            if holder != said:
                log.info("waiting: %s leads", holder or "nobody known")
                said = holder
            await _pause(stop, RENEW_SECONDS / 3)
        return False

    async def hold(self, stop: asyncio.Event) -> bool:
        """Renew until told to stop; False where somebody else leads."""
        while not stop.is_set():
            await _pause(stop, RENEW_SECONDS)
            holder = await self._try()
            if holder not in {self._identity, ""}:
                log.warning("%s leads now", holder)
                return False
        return True

    async def release(self) -> None:
        """Let go, so that the next one need not wait."""
        try:
            lease = await self._cluster.get(KIND, self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "renewTime": _now()}
                await self._cluster.replace(lease, manager=ADAPTER_MANAGER)
        except ClusterError as error:
            log.warning("lease not released: %s", error)

    async def _try(self) -> str:
        """Take or renew the lease where it is free, ours or has run out; return who holds it, empty if nobody knows."""
        try:
            lease = await self._cluster.get(KIND, self._namespace, self._name)
            if lease is None:
                return _holder(await self._cluster.create(self._body(), manager=ADAPTER_MANAGER))
            holder = _holder(lease)
            if holder not in {"", self._identity} and not self._has_run_out(lease):
                return holder
            transitions = int(lease["spec"].get("leaseTransitions") or 0) + (holder != self._identity)
            taken = {**lease, "spec": {**self._body()["spec"], "leaseTransitions": transitions}}
            if holder == self._identity:
                taken["spec"]["acquireTime"] = lease["spec"].get("acquireTime") or _now()
            return _holder(await self._cluster.replace(taken, manager=ADAPTER_MANAGER))
        except Conflict:
            return ""
        except ClusterError as error:
            log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return ""

    def _has_run_out(self, lease: Object) -> bool:
        version, now = lease["metadata"]["resourceVersion"], time.monotonic()
        if version != self._seen[0]:
            self._seen = version, now
        return now - self._seen[1] > int(lease["spec"].get("leaseDurationSeconds") or LEASE_SECONDS)

    def _body(self) -> Object:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": KIND,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": LEASE_SECONDS,
                "acquireTime": _now(),
                "renewTime": _now(),
                "leaseTransitions": 0,
            },
        }


def _holder(lease: Object) -> str:
    return str(lease["spec"].get("holderIdentity") or "")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    await asyncio.wait([waiting := asyncio.ensure_future(stop.wait())], timeout=seconds)
    waiting.cancel()
