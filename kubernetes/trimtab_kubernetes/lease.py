"""Leader election with a Lease, as in Kubernetes components.

The renew deadline is shorter than the lease duration, so a leader that cannot renew stops before another may take over.
It then stops its work, or continues it without writing (`Lease.is_held`) until the lease is its own again. Expiry is
measured with this process's clock from the last observed change, so clocks need not be synchronized.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes.client import Cluster
from trimtab_kubernetes.errors import ClusterError, Conflict
from trimtab_kubernetes.objects import Object, rfc3339_micro

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """Lease duration, renew deadline and retry period."""

    lease_duration_seconds: int = 15
    renew_deadline_seconds: float = 10.0
    retry_period_seconds: float = 2.0


class Lease:
    """One candidate for a Lease."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, identity: str, timing: Timing = Timing()) -> None:
        self._cluster, self._namespace, self._name, self._identity = cluster, namespace, name, identity
        self._timing = timing
        self._observed: tuple[str, float] = ("", 0.0)
        self._leads = False
        self._renewed = 0.0  # when the last successful renewal was sent

    @property
    def is_held(self) -> bool:
        """Whether the last renewal is recent enough that no other candidate can hold the lease."""
        return self._leads and self._remaining_seconds > 0

    async def lead(self, work: Callable[[], Awaitable[None]], *, keep_running: bool = False) -> None:
        """Run the work while the lease is held, without end. The work is cancelled when the lease is lost.

        With `keep_running` the lease counts as lost only if another candidate holds it, not if it cannot be renewed;
        the work must check `is_held`. An exception of the work ends this too.
        """
        while True:
            await self._acquire()
            log.info("%s became the leader", self._identity)
            self._leads = True
            working = asyncio.ensure_future(work())
            renewing = asyncio.create_task(self._renew(keep_running=keep_running))
            try:
                await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._leads = not renewing.done()  # the work may write while it is being cancelled
                working.cancel()
                results = await asyncio.gather(working, return_exceptions=True)
                self._leads = False
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
            if isinstance(results[0], Exception):
                raise results[0]
            log.warning("%s is no longer the leader", self._identity)

    async def release(self) -> None:
        try:
            while not await self._clear_holder():
                log.debug("conflict with the last renewal")  # it was in flight when it was cancelled
        except ClusterError as error:
            log.info("cannot release the lease, which will expire: %s", error)

    async def _clear_holder(self) -> bool:
        found = await self._cluster.get("Lease", self._namespace, self._name)
        if found is None or found["spec"].get("holderIdentity") != self._identity:
            return True
        found["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._cluster.replace(found, manager=self._identity)
        except Conflict:
            return False
        return True

    async def _acquire(self) -> None:
        while not await self._try_claim():  # noqa: ASYNC110 - expiry has no event
            await asyncio.sleep(self._timing.retry_period_seconds)

    @property
    def _remaining_seconds(self) -> float:
        return self._timing.renew_deadline_seconds - (time.monotonic() - self._renewed)

    async def _renew(self, *, keep_running: bool) -> None:
        """Renew until another candidate holds the lease, or without `keep_running` until the renew deadline."""
        while keep_running or self._remaining_seconds > 0:
            await asyncio.sleep(self._timing.retry_period_seconds)
            limit = None if keep_running else max(self._remaining_seconds, 0.1)
            try:
                async with asyncio.timeout(limit):
                    if not await self._try_claim() and self._observed[0].partition("|")[0] not in {self._identity, ""}:
                        return
            except TimeoutError:
                return

    async def _try_claim(self) -> bool:
        began = time.monotonic()
        try:
            found = await self._cluster.get("Lease", self._namespace, self._name)
            if found is None:
                await self._cluster.create(self._body(), manager=self._identity)
            elif self._is_claimable(found["spec"]):
                await self._cluster.replace(self._claimed(found), manager=self._identity)
            else:
                return False
        except ClusterError as error:
            if not isinstance(error, Conflict):
                log.warning("lease %s: %s", self._name, error)
            return False
        self._renewed = began
        return True

    def _is_claimable(self, spec: dict[str, Any]) -> bool:
        holder = spec.get("holderIdentity") or ""
        version = f"{holder}|{spec.get('renewTime')}"
        if version != self._observed[0]:
            self._observed = (version, time.monotonic())
        expired = time.monotonic() - self._observed[1] > spec.get("leaseDurationSeconds", 0)
        return holder in {"", self._identity} or expired

    def _claimed(self, found: Object) -> Object:
        spec, mine = found["spec"], self._body()["spec"]
        if spec.get("holderIdentity") == self._identity:
            mine["acquireTime"] = spec.get("acquireTime")
            mine["leaseTransitions"] = spec.get("leaseTransitions", 0)
        else:
            mine["leaseTransitions"] = spec.get("leaseTransitions", 0) + 1
        return {**found, "spec": mine}

    def _body(self) -> Object:
        now = rfc3339_micro(time.time())
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._timing.lease_duration_seconds,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }


@asynccontextmanager
async def leader_election(
    lease: Lease, work: Callable[[], Awaitable[None]], *, keep_running: bool = False
) -> AsyncIterator["asyncio.Task[None]"]:
    """Run `Lease.lead` in the background; on exit, stop the work and release the lease."""
    task = asyncio.create_task(lease.lead(work, keep_running=keep_running))
    try:
        yield task
    finally:
        held = lease.is_held
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if held:
            await lease.release()
