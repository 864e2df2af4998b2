"""Shell: keeps the door to what its router can answer in time, and counts what the door refused.

The door's bound follows the router's window; in a flood most callers are refused before the door reads what they ask.
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
CALM_LOOKS = 20
"""How many looks without a refusal for want of room make the door calm again."""
LONGEST_TOLD_SECONDS = 1.0
"""How long a door that was told its bound is taken to know it: one that was replaced meanwhile starts with its own."""


class OverloadController:
    """Steers the Envoy in front of a router.

    Args:
        envoy: its administration.
        pressure: the file in which Envoy reads which share of all requests it refuses unread.
        pacer: knows how many requests the router can answer in time, and how many it has answered.
    """

    def __init__(self, envoy: EnvoyAdmin, pressure: Path, pacer: ConcurrencyController) -> None:
        self._envoy = envoy
        self._pressure = pressure
        self._pacer = pacer
        self._bound = 0
        self._told_at = 0.0

    async def run(self) -> None:
        """Steer for ever."""
        looks, shed, since = 0, -1.0, self._counted()  # what a router before this one wrote is not known
        shedding = LoadShedder(since)
        while True:
            await self._keep_bound()
            await self._envoy.catch_up()
            now = self._counted()
            looks = CALM_LOOKS if now.refused > since.refused else max(looks - 1, 0)
            wanted, since = shedding.share(now), now
            if wanted != shed:
                await asyncio.to_thread(write_pressure, self._pressure, wanted)
                shed = wanted
            await (asyncio.sleep(CROWDED_SECONDS) if looks else self._pacer.crowded(CALM_SECONDS))

    def _counted(self) -> ProxyCounters:
        return ProxyCounters(
            time.monotonic(), self._pacer.answered, self._envoy.refused_for_room, self._envoy.came_over_http2
        )

    async def _keep_bound(self) -> None:
        most, now = self._pacer.window.limit, time.monotonic()
        if most == self._bound and now - self._told_at < LONGEST_TOLD_SECONDS:
            return
        try:
            await self._envoy.bound(most)
        except EnvoyUnavailable as error:
            self._bound = 0
            log.debug("%s", error)
        else:
            self._bound, self._told_at = most, now


def write_pressure(file: Path, share: float) -> None:
    """Tell Envoy to refuse this share (0 to 1) of all requests unread."""
    write_atomically(file, f"{share:.2f}")
