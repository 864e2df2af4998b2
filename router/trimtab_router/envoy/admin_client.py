"""Shell: Envoy's administration, over its socket: counts what it refused, bounds what it lets in, lets it drain."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp

from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.error_codes import OVERLOAD
from trimtab_router.envoy.bootstrap import LARGE, REQUESTS, bounds, large_bounds
from trimtab_router.envoy.rejection_counters import STATS, answered_by_envoy, came_over_http2, rejections_since

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0


class EnvoyUnavailable(Exception):
    """Envoy did not answer its administration's socket."""


class EnvoyAdmin:
    """The Envoy in front of a router.

    Args:
        socket: its administration's.
        noted: the file of what was counted of this Envoy, which may outlive its router.
        count: told how many requests were refused, by (HTTP status, reason), since it was told last.
        heap: bytes that it may allocate.
    """

    def __init__(
        self, socket: Path, noted: Path, count: Callable[[Mapping[tuple[int, str], int]], None], heap: int
    ) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket)), timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        )
        self._count = count
        self._heap = heap
        self._noted = noted
        self._counted = _read(noted)
        self._counting = asyncio.Lock()
        self.refused_for_room = 0
        """How many requests were refused because too many were under way, since this was made."""
        self.came_over_http2 = 0
        """How many requests came to this Envoy over HTTP/2."""

    async def catch_up(self) -> None:
        """Count what was refused since the last time; nothing while Envoy is away."""
        async with self._counting:
            try:
                text = await self._ask("GET", f"/stats?filter={STATS}")
            except EnvoyUnavailable as error:
                log.debug("%s", error)
                return
            stats, self.came_over_http2 = answered_by_envoy(text), came_over_http2(text)
            if stats == self._counted:
                return
            refused = rejections_since(self._counted, stats)
            self._counted = stats
            self.refused_for_room += sum(count for (_, reason), count in refused.items() if reason == OVERLOAD)
            self._count(refused)
            await asyncio.to_thread(write_atomically, self._noted, json.dumps(stats))

    async def bound(self, most_under_way: int) -> None:
        """Let so many requests at most be under way at the router, and large ones beside them.

        Raises:
            EnvoyAway: it cannot be told now.
        """
        told = {REQUESTS: bounds(most_under_way), LARGE: large_bounds(most_under_way, self._heap)}
        query = "&".join(
            f"circuit_breakers.{cluster}.default.{name}={most}"
            for cluster, each in told.items()
            for name, most in each.items()
        )
        await self._ask("POST", f"/runtime_modify?{query}")

    async def send_callers_away(self) -> None:
        """Ask callers to connect elsewhere, while those who come are still served."""
        await self._try("/drain_listeners?graceful&skip_exit")

    async def stop_listening(self) -> None:
        """Take no more connections; those there are stay until they are answered."""
        await self._try("/drain_listeners")

    async def close(self) -> None:
        """Forget it."""
        await self._session.close()

    async def _try(self, path: str) -> None:
        try:
            await self._ask("POST", path)
        except EnvoyUnavailable as error:
            log.info("%s", error)

    async def _ask(self, method: str, path: str) -> str:
        try:
            async with self._session.request(method, f"http://envoy{path}") as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise EnvoyUnavailable(f"envoy: {method} {path} answered {answer.status}: {text[:200]}")
                return text
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EnvoyUnavailable(f"envoy: {method} {path}: {type(error).__name__} {error}") from error


def _read(noted: Path) -> dict[str, int]:
    try:
        return {str(cause): int(count) for cause, count in json.loads(noted.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("%s: %s; what the door refused before is counted again", noted, error)
        return {}
