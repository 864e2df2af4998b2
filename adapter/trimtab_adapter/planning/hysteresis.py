"""For which load to plan: up at once, down only after the peak is past and the drop is more than noise."""

import math
from collections.abc import Iterable

MIN_DROP = 0.25
"""Share of the planned load that must go before a plan for less is worth asking for."""
NOISE_WIDTHS = 2.5
"""Standard deviations of a Poisson count: what lies between two peaks of one constant load."""
MAX_DROP = 0.6
"""Share of the planned load whose loss is never explained by noise."""
MIN_LOAD_RPS = 0.1
"""With no load at all a plan still has to answer the next request."""


def planning_load(
    forecast_rps: float,
    recent_rps: Iterable[tuple[float, float]],
    planned_rps: float | None,
    now_seconds: float,
    hold_seconds: float,
) -> float:
    """The load to plan for, in requests per second.

    `recent_rps` are (time, forecast) of earlier decisions: the greatest within `hold_seconds` counts as still to come.
    `planned_rps` is what the current plan stands on; it goes on counting until the load exceeds it or clearly drops.
    """
    held = [load for at, load in recent_rps if now_seconds - hold_seconds <= at <= now_seconds]
    wanted = max([forecast_rps, MIN_LOAD_RPS, *held])
    if planned_rps is None or wanted > planned_rps:
        return wanted
    return planned_rps if wanted >= drop_threshold(planned_rps) else wanted


def load_hold_reason(forecast_rps: float, load_rps: float, planned_rps: float | None, hold_seconds: float) -> str:
    """Say why more is planned for than was forecast; empty where it is not."""
    if load_rps <= max(forecast_rps, MIN_LOAD_RPS):
        return ""
    if planned_rps == load_rps and forecast_rps >= drop_threshold(load_rps):
        return f"the forecast of {forecast_rps:.3g} is not clearly less than that"
    return f"a peak is held for {hold_seconds:g} s; the forecast is {forecast_rps:.3g} now"


def outgrows(newest_rps: float, planned_rps: float, headroom: float) -> bool:
    """Tell whether one second's arrivals are more than a plan for `planned_rps` has room for, noise apart.

    Below the headroom, and one request a second more, the plan still carries them.
    """
    return newest_rps > (1.0 + headroom) * planned_rps + 1.0


def drop_threshold(planned_rps: float) -> float:
    """The load under which a plan for `planned_rps` is larger than noise explains."""
    noise = NOISE_WIDTHS * math.sqrt(planned_rps)
    return planned_rps - min(max(MIN_DROP * planned_rps, noise), MAX_DROP * planned_rps)
