"""Which of several copies may write: the one that holds a Lease, as Kubernetes' own components do it.

A holder that cannot renew in time knows so before another may take over: its own patience ends earlier than the lease.
Then it stops; or it goes on with what it knows, where that is worth something, but writes nothing (`Lease.is_held`) until
the lease is its own again. Expiry is judged by this process's clock from when it last saw the lease change, so clocks
need not agree.
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
from trimtab_kubernetes.objects import Object
from trimtab_kubernetes.times import rfc3339_micro

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a lease lasts, how long a holder tries to renew it, and how often everybody tries."""

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
        self._renewed = 0.0  # when what renewed it last was sent

    @property
    def is_held(self) -> bool:
        """Whether it was renewed so lately that nobody else can hold it."""
        return self._leads and self._remaining_seconds > 0

    async def lead(self, work: Callable[[], Awaitable[None]], *, keep_running: bool = False) -> None:
        """Wait for the lease and do the work while it is held; for ever. The work is cancelled when the lease is lost.

        With `keep_running` it is lost when another holds it, not already when it cannot be renewed: the work must mind `is_held`.
        An exception of the work ends this too.
        """
        while True:
            await self._acquire()
            log.info("%s leads", self._identity)
            self._leads = True
            working = asyncio.ensure_future(work())
            renewing = asyncio.create_task(self._renew(keep_running=keep_running))
            try:
                await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._leads = not renewing.done()  # else the work may still write what it ends with
                working.cancel()
                results = await asyncio.gather(working, return_exceptions=True)
                self._leads = False
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
            if isinstance(results[0], Exception):
                raise results[0]
            log.warning("%s does not lead any more", self._identity)

    async def release(self) -> None:
        """Let another take over at once."""
        try:
            while not await self._clear_holder():
                log.debug("our own last renewal came in between")  # it was under way when it was cancelled
        except ClusterError as error:
            log.info("the lease runs out by itself: %s", error)

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
        while not await self._try_claim():  # noqa: ASYNC110 - no event tells that a lease has run out
            await asyncio.sleep(self._timing.retry_period_seconds)

    @property
    def _remaining_seconds(self) -> float:
        return self._timing.renew_deadline_seconds - (time.monotonic() - self._renewed)

    async def _renew(self, *, keep_running: bool) -> None:
        """Renew until another holds it; unless told to go on, until that fails for too long."""
        while keep_running or self._remaining_seconds > 0:
            await asyncio.sleep(self._timing.retry_period_seconds)
            limit = None if keep_running else max(self._remaining_seconds, 0.1)
            try:
                async with asyncio.timeout(limit):
                    if not await self._try_claim() and self._last_holder() not in {self._identity, ""}:
                        return
            except TimeoutError:
                return

    def _last_holder(self) -> str:
        return self._observed[0].partition("|")[0]

    async def _try_claim(self) -> bool:
        began = time.monotonic()
        taken = await self._claim()
        if taken:
            self._renewed = began
        return taken

    async def _claim(self) -> bool:
        try:
            found = await self._cluster.get("Lease", self._namespace, self._name)
            if found is None:
                await self._cluster.create(self._body(), manager=self._identity)
                return True
            if not self._is_claimable(found["spec"]):
                return False
            await self._cluster.replace(self._claimed(found), manager=self._identity)
        except Conflict:
            return False
        except ClusterError as error:
            log.warning("lease %s: %s", self._name, error)
            return False
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
    """Lead in the background, as `Lease.lead` does; on leaving, stop and let another take over."""
    task = asyncio.create_task(lease.lead(work, keep_running=keep_running))
    try:
        yield task
    finally:
        held = lease.is_held
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if held:
            await lease.release()
