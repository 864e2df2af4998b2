"""Hysteresis: the planned load rises once half the headroom is used; it falls once the peak and noise are passed."""

import math
from collections.abc import Iterable

RISE_SHARE = 0.5
"""Share of the headroom that forecasts may use before more is planned for."""
MIN_DROP = 0.25
"""Smallest drop that is planned for, as a share of the planned load."""
NOISE_WIDTHS = 2.5
"""Standard deviations of a Poisson count that may lie between two peaks of one constant load."""
MAX_DROP = 0.6
"""Share of the planned load whose loss noise never explains."""
MIN_LOAD_RPS = 0.1
"""Without any load a plan must still serve the next request."""


def planning_load(
    forecast_rps: float,
    recent_rps: Iterable[tuple[float, float]],
    planned_rps: float | None,
    now_seconds: float,
    hold_seconds: float,
    headroom: float = 0.0,
) -> float:
    """The load to plan for, in requests per second.

    `recent_rps` are (time, forecast) of earlier decisions: the greatest within `hold_seconds` still counts.
    `planned_rps` is the current plan's load; it stays until the load exceeds it by half the headroom or clearly drops.
    """
    recent_peaks = [load for at, load in recent_rps if now_seconds - hold_seconds <= at <= now_seconds]
    wanted = max([forecast_rps, MIN_LOAD_RPS, *recent_peaks])
    if planned_rps is None or wanted > (1.0 + RISE_SHARE * headroom) * planned_rps:
        return wanted
    return planned_rps if wanted >= drop_threshold(planned_rps) else wanted


def load_hold_reason(forecast_rps: float, load_rps: float, planned_rps: float | None, hold_seconds: float) -> str:
    """The reason to plan for another load than the forecast; empty if the forecast is planned for."""
    if load_rps < forecast_rps:
        return f"the headroom carries the forecast of {forecast_rps:.3g}"
    if load_rps <= max(forecast_rps, MIN_LOAD_RPS):
        return ""
    if planned_rps == load_rps and forecast_rps >= drop_threshold(load_rps):
        return f"the forecast of {forecast_rps:.3g} is not clearly lower"
    return f"a peak counts for {hold_seconds:g} s; the forecast is {forecast_rps:.3g} now"


def outgrows(newest_rps: float, planned_rps: float, headroom: float) -> bool:
    """Whether one second exceeds a plan beyond its headroom and one more request, which it still carries."""
    return newest_rps > (1.0 + headroom) * planned_rps + 1.0


def drop_threshold(planned_rps: float) -> float:
    """The load below which a plan for `planned_rps` is larger than noise explains."""
    noise = NOISE_WIDTHS * math.sqrt(planned_rps)
    return planned_rps - min(max(MIN_DROP * planned_rps, noise), MAX_DROP * planned_rps)
