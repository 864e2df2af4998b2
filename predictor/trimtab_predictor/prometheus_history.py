"""Prometheus history: the load of every pipeline over the last days, for retraining."""

import asyncio
import json
import math
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.router_metrics import ARRIVALS_PEAK_RPS, RECEIVED
from trimtab_predictor.load_history import BIN_SECONDS, seconds_of_bins
from trimtab_predictor.trace import MAX_RPS

MAX_PIPELINE_SECONDS = 12_000_000
"""Of all pipelines together: two weeks of ten, half a day of three hundred."""
COUNTED_SECONDS = 600
"""Interval at which pipelines are counted."""
POINTS_PER_QUERY = 8_000
"""Prometheus returns at most 11,000 of one series."""
TIMEOUT_SECONDS = 60.0
MAX_RESPONSE_BYTES = 256 * 2**20
_BY = "by (namespace, pipeline)"
_UNKNOWN = (math.nan, math.nan)

Pipeline = tuple[str, str]
Bins = dict[Pipeline, dict[int, float]]


class PrometheusHistoryError(Exception):
    """Prometheus cannot be queried, or has no data; the message names the address and the query."""


@dataclass(frozen=True, slots=True, eq=False)
class PrometheusHistory:
    """The load of one pipeline, requests per second [S]; NaN if it was not scraped."""

    namespace: str
    pipeline: str
    rps: NDArray[np.float64]


async def read_histories(
    url: str, seconds: float, token_file: Path | None = None, certificate_authority: Path | None = None
) -> list[PrometheusHistory]:
    """The load of every pipeline over the last seconds; over fewer if there are many pipelines.

    Raises PrometheusHistoryError if Prometheus does not respond, or has no load.
    """
    tls = ssl.create_default_context(cafile=certificate_authority) if certificate_authority else True
    timeout = aiohttp.ClientTimeout(total=None, connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=True) as session:
        end = math.floor(time.time() / BIN_SECONDS) * BIN_SECONDS
        start = end - math.floor(seconds / BIN_SECONDS) * BIN_SECONDS
        queries = _PrometheusQueries(session, url.rstrip("/"), token_file)
        start = await queries.begin(start, end)
        peaks = await queries.bins(f"sum {_BY} ({ARRIVALS_PEAK_RPS})", start, end)
        means = await queries.bins(f"sum {_BY} (rate({RECEIVED}[{3 * BIN_SECONDS}s]))", start, end)
    if not peaks:
        raise PrometheusHistoryError(
            f"{url} has no {ARRIVALS_PEAK_RPS} of the last {seconds / 3600:.0f} hours; are the routers scraped?"
        )
    return [_rebuild_history(key, values, means.get(key, {})) for key, values in sorted(peaks.items())]


def _rebuild_history(key: Pipeline, peaks: Mapping[int, float], means: Mapping[int, float]) -> PrometheusHistory:
    """Put the bins in a row, missing ones as NaN, from the first that was scraped."""
    first, last = min(peaks), max(peaks)
    times = range(first, last + 1, BIN_SECONDS)
    rps = seconds_of_bins((peaks[at], means[at]) if at in peaks and at in means else _UNKNOWN for at in times)
    return PrometheusHistory(key[0], key[1], rps)


class _PrometheusQueries:
    """Range queries in parts that Prometheus accepts."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token_file: Path | None) -> None:
        self._session, self._url, self._token_file = session, url, token_file

    async def begin(self, start: int, end: int) -> int:
        """The earliest time from which the load of all pipelines together fits into memory."""
        counted = await self.bins(f"count(count {_BY} ({ARRIVALS_PEAK_RPS}))", start, end, COUNTED_SECONDS)
        pipelines = counted.get(("", ""), {})  # a count is of no pipeline
        room = MAX_PIPELINE_SECONDS
        for at in sorted(pipelines, reverse=True):
            room -= round(pipelines[at]) * COUNTED_SECONDS
            if room < 0:
                return min(at + COUNTED_SECONDS, end)
        return start

    async def bins(self, expression: str, start: int, end: int, step: int = BIN_SECONDS) -> Bins:
        """The expression's value every `step` seconds, for each pipeline."""
        found: Bins = {}
        reach = POINTS_PER_QUERY * step
        for first in range(start, end, reach):
            last = max(first, min(first + reach, end) - step)
            for series in await self._series(expression, first, last, step):
                labels = series["metric"]
                bins = found.setdefault((labels.get("namespace", ""), labels.get("pipeline", "")), {})
                bins.update(
                    {int(float(at)): value for at, text in series["values"] for value in [_value(text)] if value >= 0}
                )
        return found

    async def _series(self, expression: str, start: int, end: int, step: int) -> Sequence[Mapping[str, Any]]:
        headers = {}
        if self._token_file is not None:
            token = await asyncio.to_thread(self._token_file.read_text)
            headers["Authorization"] = f"Bearer {token.strip()}"
        query = {"query": expression, "start": str(start), "end": str(end), "step": str(step)}
        address = f"{self._url}/api/v1/query_range"
        try:
            async with self._session.get(address, params=query, headers=headers, allow_redirects=False) as response:
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > MAX_RESPONSE_BYTES:
                        raise PrometheusHistoryError(f"{self._url}: the response to {expression} is too large")
                if response.status != HTTPStatus.OK:
                    raise PrometheusHistoryError(f"{self._url} returned {response.status}: {bytes(content[:200])!r}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PrometheusHistoryError(f"{self._url} cannot be reached: {type(error).__name__} {error}") from error
        return _result(self._url, bytes(content))


def _result(url: str, content: bytes) -> Sequence[Mapping[str, Any]]:
    try:
        result = json.loads(content)["data"]["result"]
        if all(isinstance(series["metric"], dict) and isinstance(series["values"], list) for series in result):
            return list(result)
    except (ValueError, KeyError, TypeError):
        pass
    raise PrometheusHistoryError(f"{url}: expected a Prometheus response, got {content[:80]!r}")


def _value(text: object) -> float:
    """A sample's value, -1 if it is invalid."""
    try:
        value = float(str(text))
    except ValueError:
        return -1.0
    return value if math.isfinite(value) and 0 <= value <= MAX_RPS else -1.0
