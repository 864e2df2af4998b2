"""Shell: kopf brings every change to the controller and keeps the process: start, signals, probes, end.

Only low-level event handlers, which write nothing to any object: no annotations, no finalizers.
"""

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from typing import Any

import kopf

from trimtab_kubernetes import Cluster, kind_of
from trimtab_kubernetes.lease import Lease, leading
from trimtab_operator.controller import OPTIONAL_KINDS, OWN_KINDS, OWNED_KINDS, Controller
from trimtab_operator.metrics import Metrics
from trimtab_operator.objects import SELECTOR
from trimtab_operator.settings import Settings

log = logging.getLogger(__name__)

LEASE = "trimtab-operator"


class Plumbing:
    """Connects kopf with a controller."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.registry = kopf.OperatorRegistry()
        self._settings, self._metrics = settings, metrics
        self._stack = AsyncExitStack()
        self._controller: Controller | None = None
        self._leading: asyncio.Task[None] | None = None
        kopf.on.login(registry=self.registry)(_log_in)
        kopf.on.startup(registry=self.registry)(self._start)
        kopf.on.cleanup(registry=self.registry)(self._stop)
        kopf.on.probe(registry=self.registry, id="leader")(self._is_well)
        for name in (*OWN_KINDS, *OWNED_KINDS, *OPTIONAL_KINDS):
            kind = kind_of(name)
            group, _, version = kind.api_version.rpartition("/")
            kopf.on.event(group, version, kind.plural, id=name, registry=self.registry)(self._event)

    async def _start(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings)
        cluster = await self._stack.enter_async_context(await Cluster.connect())
        self._controller = Controller(cluster, self._settings, self._metrics)
        lease = Lease(cluster, self._settings.own_namespace, LEASE, self._settings.identity)
        self._leading = await self._stack.enter_async_context(leading(lease, self._controller.lead))

    async def _stop(self, **_: Any) -> None:
        await self._stack.aclose()

    async def _is_well(self, **_: Any) -> str:
        """Fail the probe where leading has ended: nothing but a restart helps then."""
        if self._leading is None or self._leading.done():
            raise RuntimeError("the controller has ended")
        return "well"

    async def _event(self, *, event: Any, **_: Any) -> None:
        if self._controller is None:
            raise kopf.PermanentError("events before the start")
        found = event["object"]
        if event["type"] == "DELETED":
            self._controller.deleted(found)
        else:
            self._controller.changed(found)


def _log_in(**kwargs: Any) -> Any:
    """Find credentials by the same rule as our own connection: KUBECONFIG before the pod's service account."""
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        return kopf.login_with_service_account(**kwargs)
    return kopf.login_with_kubeconfig(**kwargs)


def _configure(settings: kopf.OperatorSettings) -> None:
    """Watch only what is ours; write nothing."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.finalizer = "trimtab.dev/unused"
    for name in (*OWNED_KINDS, *OPTIONAL_KINDS):
        kind = kind_of(name)
        group = kind.api_version.rpartition("/")[0]
        settings.watching.label_selectors[f"{kind.plural}.{group}" if group else kind.plural] = SELECTOR
