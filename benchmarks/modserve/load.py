"""The evaluation's hours: rates for the generator of multimodal load, with a burst of images in their middle."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from trimtab_loadtester.multimodal.rates import HourlyRates, read_minutes, synthetic_rates, traffic_of
from trimtab_loadtester.multimodal.traffic import Traffic
from trimtab_predictor.trace import TraceError

TRACE: Final = "azure_lmm_per_minute_dev.csv.gz"
HOURS: Final = "azure_lmm_hourly_dev.csv"


def hours(trace: Path | None, known: HourlyRates | None, minutes: int, seed: int) -> Traffic:
    """Rates of each minute about a mean of one request a second; a burst of images takes the third in the middle.

    Args:
        trace: requests of each minute; None for made-up ones.
        known: of the trace's hours, how many requests had images.
        minutes: from the trace's first one on.
        seed: of what is made up.

    Raises:
        TraceError: the trace cannot be read, has fewer minutes, or nothing comes in them.
    """
    traffic = synthetic_rates(minutes, seed) if trace is None else traffic_of(_first(trace, minutes), known)
    middle = np.arange(minutes) * 3 // minutes == 1
    try:
        return replace(traffic.scaled(1.0), bursts=middle)
    except ValueError as error:
        raise TraceError(f"{trace}: {error} in its first {minutes} minutes") from error


def _first(trace: Path, minutes: int) -> list[float]:
    found = read_minutes(trace)
    if len(found) < minutes:
        raise TraceError(f"{trace}: {len(found)} minutes of requests; at least {minutes} are needed")
    return found[:minutes]
