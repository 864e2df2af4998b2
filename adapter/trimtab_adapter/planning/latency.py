"""Latency formulas of one stage: waiting time, service time and replicas needed, in seconds and rows.

The router forms batches work-conservingly: a free replica takes the queued rows, up to the batch size b. A row
therefore never waits for a batch to fill while a replica is free; it waits until the first of n busy replicas finishes,
and longer only if more rows wait than one batch takes. `planned_seconds` adds both to the service time. The paper's
routers hold a batch until it is full, hence its other term, (b−1)/λ in place of both (IPA, section 4.2, eq. 6–7).
"""

import math
from statistics import NormalDist
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Figure = TypeVar("Figure", float, NDArray[np.float64])
"""One figure, or an array of figures."""


def busy_wait_seconds(service_seconds: Figure, replicas: Figure, quantile: float) -> Figure:
    """The wait for the first of n busy replicas, at a quantile, given that all are busy.

    Each is at a uniform point of its batch, so the least of n residuals exceeds x with probability (1 − x/l)^n.
    """
    idle: Figure = 1.0 - (1.0 - quantile) ** (1.0 / replicas)
    return service_seconds * idle


def backlog_seconds(load_rps: float, throughput_rps: Figure, quantile: float, rows_together: float = 1.0) -> Figure:
    """The wait caused by rows that did not fit into the next batch, at a quantile.

    When a replica takes up to b rows, arrivals have brought ρ·b on average. In heavy traffic the remaining rows are
    exponential with mean r·ρ/(2(1−ρ)) (Kingman 1961) for any b, if Poisson arrivals bring r rows together (a fan-out).
    They leave at the stage's throughput. A request also waits for the rest of its own r rows and of those of the
    request before it.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        utilisation = np.divide(load_rps, throughput_rps)
        left_over = -math.log(1.0 - quantile) * rows_together * utilisation / (2.0 * (1.0 - utilisation))
    seconds = (left_over + 2.0 * max(0.0, rows_together - 1.0)) / throughput_rps
    return cast("Figure", np.where(utilisation < 1.0, seconds, math.inf)[()])


def first_token_seconds(
    row_seconds: Figure, batch_seconds: Figure, batch_size: Figure, utilisation: Figure, quantile: float
) -> Figure:
    """The time to first token of a chat that finds a free slot, at a quantile.

    Prompts queue for prefill, which then takes as long as that of all of them together, between `row_seconds` of one
    and `batch_seconds` of a full batch. Utilisation is that of prefill; the queue is that of M/M/1, in which more than
    n others are found with probability utilisation^n.
    """
    with np.errstate(divide="ignore"):
        others = math.log(1.0 - quantile) / np.log(np.minimum(utilisation, 1.0 - 1e-9))
    share = np.minimum(others / np.maximum(batch_size - 1.0, 1.0), np.minimum(batch_size - 1.0, 1.0))
    seconds: Figure = row_seconds + (batch_seconds - row_seconds) * share
    return seconds


def slot_wait_seconds(load_rps: float, throughput_rps: Figure, slots: Figure, quantile: float) -> Figure:
    """The wait of a chat for a free slot, at a quantile: that of a queue with many servers (Sakasegawa 1977).

    With deterministic service, waits are half as long as with exponential service.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        utilisation = np.divide(load_rps, throughput_rps)
        waiting = utilisation ** (np.sqrt(2.0 * (slots + 1.0)) - 1.0)
        seconds = np.log(np.maximum(waiting / (1.0 - quantile), 1.0)) / (2.0 * (1.0 - utilisation) * throughput_rps)
    return cast("Figure", np.where(utilisation < 1.0, seconds, math.inf)[()])


def planned_seconds(service_seconds: Figure, replicas: Figure, backlog: Figure, quantile: float) -> Figure:
    """The latency of a stage under work-conserving batches: backlog, wait for a busy replica, service time.

    Conservative: the previous batch is assumed full and every replica busy. Stages are added at their quantiles,
    although a request is seldom unlucky in all of them.
    """
    return service_seconds + busy_wait_seconds(service_seconds, replicas, quantile) + backlog


def sustained_load_rps(peak_rps: float, seconds: float) -> float:
    """The rate λ at which the busiest of `seconds` seconds of Poisson arrivals brings `peak_rps`: λ + z·√λ.

    A forecast predicts the busiest second. The next one brings fewer requests, so a queue grows with λ, not with the
    peak. z is the mean of the greatest of that many normal variables (Blom 1958). If arrivals vary more, observed peaks
    and λ are higher.
    """
    z = _normal_maximum(seconds)
    return ((math.sqrt(z * z + 4.0 * peak_rps) - z) / 2.0) ** 2


def busiest_rps(mean_rps: float, seconds: float) -> float:
    """The arrivals in the busiest of `seconds` seconds of Poisson arrivals; the inverse of `sustained_load_rps`."""
    return mean_rps + _normal_maximum(seconds) * math.sqrt(mean_rps)


def _normal_maximum(count: float) -> float:
    return NormalDist().inv_cdf(max((count - 0.375) / (count + 0.25), 0.5))


def required_replicas(load_rps: float, replica_rps: Figure, utilisation: float) -> Figure:
    """The fewest replicas that carry the load, ⌈λ/(ρ·h)⌉, at least one (IPA, eq. 8, with a margin ρ)."""
    # The margin prevents n + 1 replicas for a load that needs exactly n, up to rounding.
    replicas: Figure = np.maximum(1.0, np.ceil(load_rps / (utilisation * replica_rps) - 1e-9))
    return replicas
