"""Load sources: a router's admin endpoints, or a Prometheus server for routers that cannot be queried directly.

Any fault is an `ObservationError` that names the address. The router exposes its peak per second over the last ten
seconds, which survives any scrape interval up to that. A forecaster needs bins of ten seconds with the right peak and
mean, so seconds are rebuilt from these. A missing series or only old samples is a monitoring fault and never counts as
zero load. Prometheus returns a series' last sample for five minutes after its target disappears, so samples are checked
for their own age.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp

from trimtab_adapter.observation import MAX_RPS, Load, State, read_load, read_state
from trimtab_pipelines.router_state import ARRIVALS_PATH, ARRIVALS_PEAK_RPS, HISTORY_SECONDS, RECEIVED, STATE_PATH
from trimtab_predictor.load_history import BIN_SECONDS, ObservationError, seconds_of_bins
from trimtab_predictor.metrics_client import PrometheusServer, get_json

STALE_SECONDS = 30.0
"""Two of Prometheus's usual scrape intervals."""


class LoadSource(Protocol):
    """A source of the load."""

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:
        """Load of the last seconds, as far as it is known; raise ObservationError if it is missing or out of range."""


class StateSource(LoadSource, Protocol):
    """A source of the load and of the routers' measurements."""

    async def state(self) -> State:
        """Service ratios, rows per request and the last minute's outcomes."""


class RouterSource:
    """One router's admin endpoints."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url.rstrip("/")

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:  # noqa: ARG002 (the router uses its own clock)
        return read_load(await get_json(self._session, f"{self._url}{ARRIVALS_PATH}", {"seconds": str(seconds)}))

    async def state(self) -> State:
        return read_state(await get_json(self._session, f"{self._url}{STATE_PATH}"))


class PrometheusSource:
    """One pipeline's load, summed over its routers."""

    def __init__(
        self, server: PrometheusServer, namespace: str, pipeline: str, ready_routers: Callable[[], int] = lambda: 0
    ) -> None:
        """Take the server, and the expected number of routers if it is known."""
        self._server, self._url = server, server.url.rstrip("/")
        self._labels = f'{{namespace="{namespace}",pipeline="{pipeline}"}}'
        self._ready_routers = ready_routers

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:
        peak = f"{ARRIVALS_PEAK_RPS}{self._labels}"
        fresh_routers, routers = await self._require_fresh(peak), self._ready_routers()
        fresh = f"sum({peak} and time() - timestamp({peak}) <= {STALE_SECONDS:.0f})"
        span = (now_seconds - seconds + BIN_SECONDS, now_seconds)
        peaks = await self._range(f"sum({peak})", fresh, span)
        rates = f"sum(rate({RECEIVED}{self._labels}[{3 * BIN_SECONDS}s]))"
        means = await self._range(rates, rates, span)
        if not peaks:
            raise self._unknown()
        missing = f"Prometheus has {fresh_routers} of {routers} routers" if fresh_routers < routers else ""
        return Load(now_seconds, _seconds(peaks, means), missing)

    async def _require_fresh(self, peak: str) -> int:
        """The number of routers with a recent sample, by the server's clock; raise if there is none."""
        ages_seconds = [series.value[1] for series in await self._server.query(f"time() - timestamp({peak})")]
        if not ages_seconds:
            raise self._unknown()
        if not min(ages_seconds) <= STALE_SECONDS:
            age = f"{min(ages_seconds):.0f} s old, above {STALE_SECONDS:.0f} s"
            raise ObservationError(f"{self._url}: the newest {peak} is {age}", "Stale")
        return sum(age <= STALE_SECONDS for age in ages_seconds)

    def _unknown(self) -> ObservationError:
        """The error for a series that does not exist or ended between two queries."""
        metric = f"{ARRIVALS_PEAK_RPS}{self._labels}"
        return ObservationError(f"{self._url} has no {metric}; is the router scraped?", "Missing")

    async def _range(self, metric: str, expression: str, span: tuple[float, float]) -> dict[int, float]:
        """The value of each bin in a time span, by bin number; errors name `metric`."""
        series = await self._server.query_range(expression, *span, BIN_SECONDS)
        samples = series[0].values if series else []
        for at, value in samples:
            if not 0 <= value <= MAX_RPS:
                raise ObservationError(f"{self._url}: {metric} is {value:g} at {at:.0f}; expected 0 to {MAX_RPS:g}")
        return {round((at - span[0]) / BIN_SECONDS): value for at, value in samples}


def _seconds(peaks: Mapping[int, float], means: Mapping[int, float]) -> tuple[float, ...]:
    """Rebuild the seconds of each bin with its peak and mean; NaN for missing bins."""
    numbers = range(min(peaks), max(peaks) + 1)
    seconds = seconds_of_bins((peaks.get(n, math.nan), means.get(n, math.nan)) for n in numbers)
    start = next((n for n, value in enumerate(seconds) if value > 0), 0)
    return tuple(seconds[start:].tolist())
