"""`StatusWriter`: writes a tick's status, and an Event if the plan changed, without delaying the control loop.

During a write only the newest status waits, but no event is lost.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from trimtab_adapter.cluster.config_source import PIPELINE, ClusterCache
from trimtab_adapter.cluster.status import build_status, plan_changed_event, rejection_events, significant_fields
from trimtab_adapter.controller import Tick
from trimtab_kubernetes import Cluster, ClusterError, Conflict, Rejected
from trimtab_kubernetes.objects import Key, Object
from trimtab_pipelines.kubernetes_names import ADAPTER_MANAGER
from trimtab_pipelines.resource import API_VERSION

log = logging.getLogger(__name__)

MAX_QUEUED_EVENTS = 20


class StatusWriter:
    """One pipeline's status and events."""

    def __init__(self, cluster: Cluster, cache: ClusterCache, key: Key) -> None:
        self._cluster, self._cache, self._key = cluster, cache, key
        self._status: dict[str, Any] | None = None  # desired; None before the first tick
        self._applied: tuple[Any, ...] | None = None
        self._events: list[Object] = []
        self._rejected_replicas: Collection[str] = ()  # at the last tick
        self._writing: asyncio.Task[None] | None = None

    def report(self, tick: Tick) -> None:
        """Write what is new about a tick in the background."""
        pipeline = self._cache.get(PIPELINE, self._key)
        if pipeline is None:
            return
        before = pipeline.get("status") or {} if self._status is None else self._status
        self._status = build_status(tick, before, int(pipeline["metadata"].get("generation", 0)))
        events = rejection_events(tick, self._rejected_replicas, pipeline)
        self._rejected_replicas = tick.rejected_replicas.keys()
        if (changed := plan_changed_event(tick, pipeline)) is not None:
            events.append(changed)
        self._events = [*self._events, *events][-MAX_QUEUED_EVENTS:]
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        """Write until nothing is new: a report during a write does not wait for the next tick."""
        try:
            while (status := self._unwritten) is not None or self._events:
                if status is not None:
                    await self._write_status(status)
                for event in tuple(self._events):
                    await self._create(event)
                    self._events = [other for other in self._events if other is not event]
        except ClusterError as error:
            log.warning("%s/%s: status not written: %s; retrying at the next tick", *self._key, error)
        except Exception:
            log.exception("%s/%s: status not written", *self._key)

    async def _create(self, event: Object) -> None:
        try:
            await self._cluster.create(event, manager=ADAPTER_MANAGER)
        except Conflict:
            log.debug("event %s exists", event["metadata"]["name"])  # only the response was lost
        except Rejected as error:
            log.warning("%s/%s: event not written: %s", *self._key, error)

    @property
    def _unwritten(self) -> dict[str, Any] | None:
        """The status, if it differs from the last one written."""
        return None if self._status is None or significant_fields(self._status) == self._applied else self._status

    async def _write_status(self, status: dict[str, Any]) -> None:
        named = {"name": self._key[1], "namespace": self._key[0]}
        body = {"apiVersion": API_VERSION, "kind": PIPELINE, "metadata": named, "status": status}
        await self._cluster.apply(body, manager=ADAPTER_MANAGER, subresource="status")
        self._applied = significant_fields(status)
