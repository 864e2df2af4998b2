"""`PrometheusSource`: the load of a pipeline from a Prometheus server, for routers that cannot be queried directly.

The router exposes its peak per second over the last ten seconds, which survives any scrape interval up to that. A
forecaster needs bins of ten seconds with the right peak and mean, so seconds are rebuilt from these. A missing series
or only old samples is a monitoring fault and never counts as zero load. Prometheus returns a series' last sample for
five minutes after its target disappears, so samples are checked for their own age.
"""

import math
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from trimtab_adapter.load_sources import get_json
from trimtab_adapter.observation import MAX_RPS, Load, ObservationError
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.router_metrics import ARRIVALS_PEAK_RPS, RECEIVED
from trimtab_pipelines.router_state import HISTORY_SECONDS
from trimtab_predictor.load_history import BIN_SECONDS, seconds_of_bins

STALE_SECONDS = 30.0
"""Two of Prometheus's usual scrape intervals."""


@dataclass(frozen=True, slots=True)
class Server:
    """A Prometheus server, and the file of its bearer token, read for each query."""

    session: aiohttp.ClientSession
    url: str
    token_file: Path | None = None

    def headers(self) -> dict[str, str]:
        if self.token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}
        except OSError as error:
            raise ObservationError(f"Prometheus token {self.token_file}: {error.strerror}", "Missing") from error


def tls_context(authorities: Path | None) -> ssl.SSLContext | bool:
    if authorities is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(authorities))
    except OSError as error:
        raise DocumentError(f"--prometheus-ca {authorities}: {error.strerror or error}") from error


class PrometheusSource:
    """One pipeline's load, summed over its routers."""

    def __init__(
        self, server: Server, namespace: str, pipeline: str, ready_routers: Callable[[], int] | None = None
    ) -> None:
        """Take the server, and the expected number of routers if it is known."""
        self._server, self._url = server, server.url.rstrip("/")
        self._labels = f'{{namespace="{namespace}",pipeline="{pipeline}"}}'
        self._ready_routers = ready_routers

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:
        """Load of the last seconds; raise ObservationError if it is missing, stale or out of range."""
        peak = f"{ARRIVALS_PEAK_RPS}{self._labels}"
        fresh_routers = await self._require_fresh()
        fresh = f"sum({peak} and time() - timestamp({peak}) <= {STALE_SECONDS:.0f})"
        span = (now_seconds - seconds + BIN_SECONDS, now_seconds)
        peaks = await self._range(f"sum({peak})", fresh, span)
        rates = f"sum(rate({RECEIVED}{self._labels}[{3 * BIN_SECONDS}s]))"
        means = await self._range(rates, rates, span)
        if not peaks:
            raise self._unknown()
        return Load(now_seconds, _seconds(peaks, means), self._missing(fresh_routers))

    def _missing(self, fresh_routers: int) -> str:
        expected = 0 if self._ready_routers is None else self._ready_routers()
        return f"Prometheus has {fresh_routers} of {expected} routers" if fresh_routers < expected else ""

    async def _require_fresh(self) -> int:
        """The number of routers with a recent sample, by the server's clock; raise if there is none."""
        ages = f"time() - timestamp({ARRIVALS_PEAK_RPS}{self._labels})"
        series = await self._query("query", {"query": ages})
        if not series:
            raise self._unknown()
        ages_seconds = [_value(one.get("value"), "age of the newest sample")[1] for one in series]
        if min(ages_seconds) > STALE_SECONDS:
            age = f"{min(ages_seconds):.0f} s old, above {STALE_SECONDS:.0f} s"
            raise ObservationError(f"{self._url}: the newest {ARRIVALS_PEAK_RPS}{self._labels} is {age}", "Stale")
        return sum(age <= STALE_SECONDS for age in ages_seconds)

    def _unknown(self) -> ObservationError:
        """The error for a series that does not exist or ended between two queries."""
        return ObservationError(
            f"{self._url} has no {ARRIVALS_PEAK_RPS}{self._labels}; is the router scraped?", "Missing"
        )

    async def _range(self, metric: str, expression: str, span: tuple[float, float]) -> dict[int, float]:
        """The value of each bin in a time span, by bin number; errors name `metric`."""
        start_seconds, end_seconds = span
        parameters = {
            "query": expression,
            "start": f"{start_seconds:.3f}",
            "end": f"{end_seconds:.3f}",
            "step": str(BIN_SECONDS),
        }
        series = await self._query("query_range", parameters)
        samples = series[0].get("values") if series else []
        if not isinstance(samples, list):
            raise ObservationError(f"{self._url}: {metric} returned {str(samples)[:80]!r}, not a list of samples")
        read = [_value(sample, metric) for sample in samples]
        for at, value in read:
            if not 0 <= value <= MAX_RPS:
                raise ObservationError(f"{self._url}: {metric} is {value:g} at {at:.0f}; expected 0 to {MAX_RPS:g}")
        return {round((at - start_seconds) / BIN_SECONDS): value for at, value in read}

    async def _query(self, kind: str, parameters: dict[str, str]) -> Sequence[dict[str, object]]:
        content = await get_json(self._server.session, f"{self._url}/api/v1/{kind}", parameters, self._server.headers())
        data = content.get("data") if isinstance(content, dict) else None
        result = data.get("result") if isinstance(data, dict) else None
        if not isinstance(result, list) or not all(isinstance(series, dict) for series in result):
            raise ObservationError(f"{self._url}: expected a Prometheus response, got {str(content)[:80]!r}")
        return result


def _value(sample: object, metric: str) -> tuple[float, float]:
    if not isinstance(sample, list) or len(sample) != 2:
        raise ObservationError(f"{metric}: {str(sample)[:80]!r} is not a sample")
    try:
        at, value = float(sample[0]), float(sample[1])
    except (TypeError, ValueError):
        raise ObservationError(f"{metric}: {str(sample)[:80]!r} is not a sample") from None
    if not math.isfinite(value):
        raise ObservationError(f"{metric} is {sample[1]}; expected a finite number")
    return at, value


def _seconds(peaks: Mapping[int, float], means: Mapping[int, float]) -> tuple[float, ...]:
    """Rebuild the seconds of each bin with its peak and mean; NaN for missing bins."""
    numbers = range(min(peaks), max(peaks) + 1)
    seconds = seconds_of_bins((peaks.get(n, math.nan), means.get(n, math.nan)) for n in numbers)
    start = next((n for n, value in enumerate(seconds) if value > 0), 0)
    return tuple(seconds[start:].tolist())
