"""`OverloadController`: keeps Envoy at the router's concurrency limit, and counts Envoy's rejections.

In a flood Envoy rejects most requests before reading them.
"""

import asyncio
import logging
import time
from pathlib import Path

from trimtab_pipelines.documents import write_atomically
from trimtab_router.admission.concurrency_controller import ConcurrencyController
from trimtab_router.envoy.admin_client import EnvoyAdmin, EnvoyUnavailable
from trimtab_router.envoy.load_shedding import LoadShedder, ProxyCounters

log = logging.getLogger(__name__)

CALM_SECONDS, CROWDED_SECONDS = 1.0, 0.1
CALM_ITERATIONS = 20
"""Iterations without a rejection for lack of capacity after which the load counts as calm."""
LIMIT_REFRESH_SECONDS = 1.0
"""Interval after which the limit is set again: an Envoy that was replaced meanwhile starts with its own."""


class OverloadController:
    """Controller of the Envoy in front of a router. Envoy reads the share to reject unread from `pressure`."""

    def __init__(self, envoy: EnvoyAdmin, pressure: Path, concurrency: ConcurrencyController) -> None:
        self._envoy = envoy
        self._pressure = pressure
        self._concurrency = concurrency
        self._limit = 0
        self._limit_set_at = 0.0

    async def run(self) -> None:
        iterations_left, share, previous = (
            0,
            -1.0,
            self._read_counters(),
        )  # the share written by a previous router is unknown
        shedding = LoadShedder(previous)
        while True:
            await self._update_limit()
            await self._envoy.sync_counters()
            now = self._read_counters()
            iterations_left = CALM_ITERATIONS if now.rejections > previous.rejections else max(iterations_left - 1, 0)
            wanted_share, previous = shedding.share(now), now
            if wanted_share != share:
                await asyncio.to_thread(write_pressure, self._pressure, wanted_share)
                share = wanted_share
            await (
                asyncio.sleep(CROWDED_SECONDS)
                if iterations_left
                else self._concurrency.wait_until_nearly_full(CALM_SECONDS)
            )

    def _read_counters(self) -> ProxyCounters:
        return ProxyCounters(
            time.monotonic(), self._concurrency.responses, self._envoy.overload_rejections, self._envoy.http2_requests
        )

    async def _update_limit(self) -> None:
        limit, now = self._concurrency.concurrency_limit.limit, time.monotonic()
        if limit == self._limit and now - self._limit_set_at < LIMIT_REFRESH_SECONDS:
            return
        try:
            await self._envoy.set_limits(limit)
        except EnvoyUnavailable as error:
            self._limit = 0
            log.debug("%s", error)
        else:
            self._limit, self._limit_set_at = limit, now


def write_pressure(file: Path, share: float) -> None:
    write_atomically(file, f"{share:.2f}")
