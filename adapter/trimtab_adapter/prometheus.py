"""Shell: the load of a pipeline as a Prometheus server has it, for where routers cannot be asked one by one.

The router exposes its peak per second over the last ten seconds, which survives any scrape interval up to that. Bins of
ten seconds with the right peak and the right mean are all a forecaster needs, so the seconds are rebuilt from these.
No series, or only old samples, is a fault of the monitoring and never counts as zero load.
"""

import math
from collections.abc import Sequence

import httpx

from trimtab_adapter.observation import MOST_RPS, Load, ObservationError
from trimtab_adapter.sources import get_json

BIN_SECONDS = 10
HISTORY_SECONDS = 600
STALE_SECONDS = 30.0  # two of Prometheus's usual scrape intervals
PEAK = "trimtab_arrivals_peak_rps"
RECEIVED = "trimtab_requests_received_total"


class PrometheusSource:
    """One pipeline's load, summed over its routers."""

    def __init__(self, client: httpx.AsyncClient, url: str, namespace: str, pipeline: str) -> None:
        self._client, self._url = client, url.rstrip("/")
        self._labels = f'{{namespace="{namespace}",pipeline="{pipeline}"}}'

    async def load(self, now_seconds: float) -> Load:
        """Return the last ten minutes; raise ObservationError where they are missing, stale or absurd."""
        await self._require_fresh()
        peaks = await self._range(f"sum({PEAK}{self._labels})", now_seconds)
        means = await self._range(f"sum(rate({RECEIVED}{self._labels}[{3 * BIN_SECONDS}s]))", now_seconds)
        by_time = dict(means)
        bins = [(peak, min(by_time.get(at, peak), peak)) for at, peak in peaks]
        if not bins:
            raise self._unknown()
        return Load(now_seconds, _seconds(bins))

    async def _require_fresh(self) -> None:
        """Raise unless a sample is recent by the server's own clock."""
        found = await self._query("query", {"query": f"time() - max(timestamp({PEAK}{self._labels}))"})
        if not found:
            raise self._unknown()
        age = _value(found[0].get("value"), "age of the newest sample")[1]
        if age > STALE_SECONDS:
            raise ObservationError(
                f"{self._url}: the newest {PEAK}{self._labels} is {age:.0f} s old, above {STALE_SECONDS:.0f} s"
            )

    def _unknown(self) -> ObservationError:
        """No series, or one that ended between two questions."""
        return ObservationError(f"{self._url} knows no {PEAK}{self._labels}; is the router scraped?")

    async def _range(self, expression: str, now_seconds: float) -> list[tuple[float, float]]:
        parameters = {
            "query": expression,
            "start": f"{now_seconds - HISTORY_SECONDS + BIN_SECONDS:.3f}",
            "end": f"{now_seconds:.3f}",
            "step": str(BIN_SECONDS),
        }
        found = await self._query("query_range", parameters)
        samples = found[0].get("values") if found else []
        if not isinstance(samples, list):
            raise ObservationError(f"{self._url}: {expression} answered {str(samples)[:80]!r}, not a list of samples")
        read = [_value(sample, expression) for sample in samples]
        for at, value in read:
            if not 0 <= value <= MOST_RPS:
                raise ObservationError(
                    f"{self._url}: {expression} is {value:g} at {at:.0f}; expected 0 to {MOST_RPS:g}"
                )
        return read

    async def _query(self, kind: str, parameters: dict[str, str]) -> Sequence[dict[str, object]]:
        content = await get_json(self._client, f"{self._url}/api/v1/{kind}", parameters)
        data = content.get("data") if isinstance(content, dict) else None
        result = data.get("result") if isinstance(data, dict) else None
        if not isinstance(result, list) or not all(isinstance(series, dict) for series in result):
            raise ObservationError(f"{self._url}: expected a Prometheus answer, got {str(content)[:80]!r}")
        return result


def _value(sample: object, what: str) -> tuple[float, float]:
    """Read a [time, "value"] pair."""
    if not isinstance(sample, list) or len(sample) != 2:
        raise ObservationError(f"{what}: {str(sample)[:80]!r} is no sample")
    try:
        at, value = float(sample[0]), float(sample[1])
    except (TypeError, ValueError):
        raise ObservationError(f"{what}: {str(sample)[:80]!r} is no sample") from None
    if not math.isfinite(value):
        raise ObservationError(f"{what} is {sample[1]}; expected a finite number")
    return at, value


def _seconds(bins: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Rebuild the seconds of each bin so that its peak and its mean are kept, the peak last."""
    seconds: list[float] = []
    for peak, mean in bins:
        others = max(0.0, (mean * BIN_SECONDS - peak) / (BIN_SECONDS - 1))
        seconds += [min(others, peak)] * (BIN_SECONDS - 1) + [peak]
    first = next((n for n, value in enumerate(seconds) if value > 0), 0)
    return tuple(seconds[first:])
