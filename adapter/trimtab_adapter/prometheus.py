"""The load of a pipeline as a Prometheus server has it, for where routers cannot be asked one by one.

The router exposes its peak per second over the last ten seconds, which survives any scrape interval up to that. Bins of
ten seconds with the right peak and the right mean are all a forecaster needs, so the seconds are rebuilt from these.
No series, or only old samples, is a fault of the monitoring and never counts as zero load. Prometheus goes on
answering with a series' last sample for five minutes where nobody told it that the router is gone: samples count by
their own age.
"""

import math
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from trimtab_adapter.load_sources import get_json
from trimtab_adapter.observation import MAX_RPS, Load, ObservationError
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.router_metrics import ARRIVALS_PEAK_RPS, RECEIVED
from trimtab_pipelines.router_state import HISTORY_SECONDS
from trimtab_predictor.downsampled_history import BIN_SECONDS, seconds_of_bins

STALE_SECONDS = 30.0
"""Two of Prometheus's usual scrape intervals."""


@dataclass(frozen=True, slots=True)
class Server:
    """A Prometheus server, and the file of the bearer token it wants, read anew for each question."""

    client: httpx.AsyncClient
    url: str
    token_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """What proves who asks."""
        if self.token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}
        except OSError as error:
            raise ObservationError(f"the Prometheus token {self.token_file}: {error.strerror}", "Missing") from error


def tls_context(authorities: Path | None) -> ssl.SSLContext | bool:
    """Which certificates to believe: those signed by a file's authorities, else what everybody believes."""
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
        """Take the server, and how many routers there ought to be, where anybody knows that."""
        self._server, self._url = server, server.url.rstrip("/")
        self._labels = f'{{namespace="{namespace}",pipeline="{pipeline}"}}'
        self._ready_routers = ready_routers

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:
        """The last so many seconds; raise ObservationError where they are missing, stale or absurd."""
        peak = f"{ARRIVALS_PEAK_RPS}{self._labels}"
        found = await self._require_fresh()
        fresh = f"sum({peak} and time() - timestamp({peak}) <= {STALE_SECONDS:.0f})"
        span = (now_seconds - seconds + BIN_SECONDS, now_seconds)
        peaks = await self._range(f"sum({peak})", fresh, span)
        rates = f"sum(rate({RECEIVED}{self._labels}[{3 * BIN_SECONDS}s]))"
        means = await self._range(rates, rates, span)
        if not peaks:
            raise self._unknown()
        return Load(now_seconds, _seconds(peaks, means), self._missing(found))

    def _missing(self, found: int) -> str:
        wanted = 0 if self._ready_routers is None else self._ready_routers()
        return f"Prometheus has {found} of {wanted} routers" if found < wanted else ""

    async def _require_fresh(self) -> int:
        """How many routers have a recent sample, by the server's own clock; raise where none has."""
        ages = f"time() - timestamp({ARRIVALS_PEAK_RPS}{self._labels})"
        found = await self._query("query", {"query": ages})
        if not found:
            raise self._unknown()
        read = [_value(series.get("value"), "age of the newest sample")[1] for series in found]
        if min(read) > STALE_SECONDS:
            age = f"{min(read):.0f} s old, above {STALE_SECONDS:.0f} s"
            raise ObservationError(f"{self._url}: the newest {ARRIVALS_PEAK_RPS}{self._labels} is {age}", "Stale")
        return sum(age <= STALE_SECONDS for age in read)

    def _unknown(self) -> ObservationError:
        """No series, or one that ended between two questions."""
        return ObservationError(
            f"{self._url} knows no {ARRIVALS_PEAK_RPS}{self._labels}; is the router scraped?", "Missing"
        )

    async def _range(self, what: str, expression: str, span: tuple[float, float]) -> dict[int, float]:
        """The value of each bin from one moment to another that has one, by its number; errors name `what`."""
        start_seconds, end_seconds = span
        parameters = {
            "query": expression,
            "start": f"{start_seconds:.3f}",
            "end": f"{end_seconds:.3f}",
            "step": str(BIN_SECONDS),
        }
        found = await self._query("query_range", parameters)
        samples = found[0].get("values") if found else []
        if not isinstance(samples, list):
            raise ObservationError(f"{self._url}: {what} answered {str(samples)[:80]!r}, not a list of samples")
        read = [_value(sample, what) for sample in samples]
        for at, value in read:
            if not 0 <= value <= MAX_RPS:
                raise ObservationError(f"{self._url}: {what} is {value:g} at {at:.0f}; expected 0 to {MAX_RPS:g}")
        return {round((at - start_seconds) / BIN_SECONDS): value for at, value in read}

    async def _query(self, kind: str, parameters: dict[str, str]) -> Sequence[dict[str, object]]:
        content = await get_json(self._server.client, f"{self._url}/api/v1/{kind}", parameters, self._server.headers())
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


def _seconds(peaks: Mapping[int, float], means: Mapping[int, float]) -> tuple[float, ...]:
    """Rebuild the seconds of each bin so that its peak and mean are kept; NaN where there was none."""
    numbers = range(min(peaks), max(peaks) + 1)
    seconds = seconds_of_bins((peaks.get(n, math.nan), means.get(n, math.nan)) for n in numbers)
    start = next((n for n, value in enumerate(seconds) if value > 0), 0)
    return tuple(seconds[start:].tolist())
