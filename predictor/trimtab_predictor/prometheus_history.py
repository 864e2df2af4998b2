"""Prometheus history: the load of every pipeline over the last days, for retraining."""

import math
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.router_state import ARRIVALS_PEAK_RPS, RECEIVED
from trimtab_predictor.load_history import BIN_SECONDS, ObservationError, seconds_of_bins
from trimtab_predictor.metrics_client import PrometheusServer, open_session, tls_context
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


async def read_histories(
    url: str, seconds: float, token_file: Path | None = None, certificate_authority: Path | None = None
) -> list[NDArray[np.float64]]:
    """The load [S] of each pipeline in the last seconds, or fewer if there are many; ObservationError without any."""
    async with open_session(TIMEOUT_SECONDS, tls=tls_context(certificate_authority), trust_env=True) as session:
        server = PrometheusServer(session, url, token_file, MAX_RESPONSE_BYTES)
        end = math.floor(time.time() / BIN_SECONDS) * BIN_SECONDS
        start = end - math.floor(seconds / BIN_SECONDS) * BIN_SECONDS
        start = await _first_second(server, start, end)
        peaks = await _bins(server, f"sum {_BY} ({ARRIVALS_PEAK_RPS})", start, end)
        means = await _bins(server, f"sum {_BY} (rate({RECEIVED}[{3 * BIN_SECONDS}s]))", start, end)
    if not peaks:
        span = f"the last {seconds / 3600:.0f} hours"
        raise ObservationError(f"{url} has no {ARRIVALS_PEAK_RPS} of {span}; are the routers scraped?", "Missing")
    histories = []
    for pipeline, values in sorted(peaks.items()):
        times, levels = range(min(values), max(values) + 1, BIN_SECONDS), means.get(pipeline, {})
        known = ((values[at], levels[at]) if at in values and at in levels else _UNKNOWN for at in times)
        histories.append(seconds_of_bins(known))
    return histories


async def _first_second(server: PrometheusServer, start: int, end: int) -> int:
    """The earliest time from which the load of all pipelines together fits into memory."""
    counted = await _bins(server, f"count(count {_BY} ({ARRIVALS_PEAK_RPS}))", start, end, COUNTED_SECONDS)
    pipelines = counted.get(("", ""), {})  # a count is of no pipeline
    room = MAX_PIPELINE_SECONDS
    for at in sorted(pipelines, reverse=True):
        room -= round(pipelines[at]) * COUNTED_SECONDS
        if room < 0:
            return min(at + COUNTED_SECONDS, end)
    return start


async def _bins(server: PrometheusServer, expression: str, start: int, end: int, step: int = BIN_SECONDS) -> Bins:
    """The expression's valid values every `step` seconds, for each pipeline, queried in parts Prometheus accepts."""
    found: Bins = {}
    reach = POINTS_PER_QUERY * step
    for first in range(start, end, reach):
        last = max(first, min(first + reach, end) - step)
        for series in await server.query_range(expression, first, last, step):
            pipeline = series.metric.get("namespace", ""), series.metric.get("pipeline", "")
            valid = {int(at): value for at, value in series.values if 0 <= value <= MAX_RPS}
            found.setdefault(pipeline, {}).update(valid)
    return found
