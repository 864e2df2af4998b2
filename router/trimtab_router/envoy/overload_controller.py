"""`OverloadController`: keeps Envoy at the router's concurrency limit, and counts Envoy's rejections."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import aiohttp

from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.request_outcome import OVERLOAD
from trimtab_router.admission.admission import ConcurrencyController
from trimtab_router.envoy.bootstrap import LARGE, REQUESTS, circuit_breaker_limits, large_request_limits
from trimtab_router.envoy.rejection_counters import (
    STATS,
    LoadShedder,
    ProxyCounters,
    parse_http2_requests,
    parse_local_replies,
    rejections_since,
)

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0


class EnvoyUnavailable(Exception):
    """Envoy did not respond on its admin socket."""


class EnvoyAdmin:
    """The Envoy in front of a router.

    `counters_file` keeps its last counters: it may outlive the router. `count` is called with the requests rejected
    since the last call, by (HTTP status, reason). `heap`: bytes that Envoy may allocate.
    """

    def __init__(
        self, socket: Path, counters_file: Path, count: Callable[[Mapping[tuple[int, str], int]], None], heap: int
    ) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket)), timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        )
        self._count = count
        self._heap = heap
        self._counters_file = counters_file
        self._counters = _read(counters_file)
        self._counters_lock = asyncio.Lock()
        self.overload_rejections = 0  # requests rejected because too many were in flight, since this client was created
        self.http2_requests = 0  # requests received over HTTP/2 since Envoy started

    async def sync_counters(self) -> None:
        """Count the rejections since the last call. Does nothing while Envoy is unavailable."""
        async with self._counters_lock:
            try:
                text = await self._request("GET", f"/stats?filter={STATS}")
            except EnvoyUnavailable as error:
                log.debug("%s", error)
                return
            stats, self.http2_requests = parse_local_replies(text), parse_http2_requests(text)
            if stats == self._counters:
                return
            rejections = rejections_since(self._counters, stats)
            self._counters = stats
            self.overload_rejections += sum(count for (_, reason), count in rejections.items() if reason == OVERLOAD)
            self._count(rejections)
            await write_if_possible(self._counters_file, json.dumps(stats))

    async def set_limits(self, max_in_flight: int) -> None:
        """Set the maximum number of requests in flight to the router. Raises EnvoyUnavailable."""
        limits = {
            REQUESTS: circuit_breaker_limits(max_in_flight),
            LARGE: large_request_limits(max_in_flight, self._heap),
        }
        query = "&".join(
            f"circuit_breakers.{cluster}.default.{name}={maximum}"
            for cluster, cluster_limits in limits.items()
            for name, maximum in cluster_limits.items()
        )
        await self._request("POST", f"/runtime_modify?{query}")

    async def certificate_expirations(self) -> list[datetime]:
        """Expiration times of the certificates in use. Raises EnvoyUnavailable."""
        content = json.loads(await self._request("GET", "/certs"))
        chains = [certificate.get("cert_chain", ()) for certificate in content.get("certificates", ())]
        return [datetime.fromisoformat(entry["expiration_time"]) for chain in chains for entry in chain]

    async def drain_gracefully(self) -> None:
        await self._post("/drain_listeners?graceful&skip_exit")

    async def stop_listening(self) -> None:
        """Accept no more connections. Existing ones stay until their requests are answered."""
        await self._post("/drain_listeners")

    async def close(self) -> None:
        await self._session.close()

    async def _post(self, path: str) -> None:
        try:
            await self._request("POST", path)
        except EnvoyUnavailable as error:
            log.info("%s", error)

    async def _request(self, method: str, path: str) -> str:
        try:
            async with self._session.request(method, f"http://envoy{path}") as response:
                text = await response.text()
                if response.status != 200:
                    raise EnvoyUnavailable(f"envoy: {method} {path} returned {response.status}: {text[:200]}")
                return text
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EnvoyUnavailable(f"envoy: {method} {path}: {type(error).__name__} {error}") from error


def _read(counters_file: Path) -> dict[str, int]:
    try:
        return {str(cause): int(count) for cause, count in json.loads(counters_file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("%s: %s; earlier rejections are counted again", counters_file, error)
        return {}


CALM_SECONDS, CROWDED_SECONDS = 1.0, 0.1
CALM_ITERATIONS = 20  # iterations without a rejection for lack of capacity after which the load counts as calm
LIMIT_REFRESH_SECONDS = 1.0  # interval at which the limit is set again: Envoy may have been replaced


async def write_if_possible(file: Path, content: str) -> bool:
    """Write a file in a thread; a failure, as on a full disk, is logged and returned."""
    try:
        await asyncio.to_thread(write_atomically, file, content)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)
        return False
    return True


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
            if wanted_share != share and await write_if_possible(self._pressure, f"{wanted_share:.2f}"):
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
