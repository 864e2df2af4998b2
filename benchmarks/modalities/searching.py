"""Finds loads: the most a method carries with hardly any violation, and the one at which it violates so much."""

from collections.abc import Callable
from typing import Protocol

from benchmarks.modalities.run import Run
from benchmarks.modalities.setting import Jobs

FEW = 0.01
"""Of jobs: violations that are allowed."""
STEPS, FINENESS = 9, 1.02
LOADS_TRIED = 5
Tell = Callable[[Run], None]


class Offered(Protocol):
    """What takes loads."""

    async def offer(self, jobs: Jobs, jobs_rps: float, seconds: float, seed: int = 1) -> Run:
        """Offer one."""


async def most_carried(serving: Offered, jobs: Jobs, first_rps: float, seconds: float, tell: Tell) -> Run:
    """The run of most load with hardly any violation, found by doubling and halving, then within two percent.

    Raises:
        RuntimeError: even little load is violated.
    """
    best: Run | None = None
    rate_rps, too_much = first_rps, float("inf")
    for _ in range(STEPS):
        run = await serving.offer(jobs, rate_rps, seconds)
        tell(run)
        if run.violations <= FEW:
            best = run
        else:
            too_much = rate_rps
        least = best.jobs_rps if best is not None else 0.0
        if best is not None and too_much / least < FINENESS:
            break
        rate_rps = _next(least, too_much)
    if best is None:
        raise RuntimeError(f"violated even at {too_much:.3g} jobs/s")
    return best


def _next(least: float, too_much: float) -> float:
    if too_much == float("inf"):
        return least * 1.5
    if not least:
        return too_much / 1.6
    return float((least * too_much) ** 0.5)


async def violating(serving: Offered, jobs: Jobs, share: float, carried_rps: float, seconds: float, tell: Tell) -> Run:
    """The run in which about this share of jobs is violated, by regula falsi from a load that is just carried."""
    rate_rps = carried_rps / (1.0 - share)
    best: Run | None = None
    low, high = (carried_rps, 0.0), (float("inf"), 1.0)
    for _ in range(LOADS_TRIED):
        run = await serving.offer(jobs, rate_rps, seconds)
        tell(run)
        if best is None or abs(run.violations - share) < abs(best.violations - share):
            best = run
        if abs(run.violations - share) < 0.02:
            break
        if run.violations < share:
            low = (rate_rps, run.violations)
        else:
            high = (rate_rps, run.violations)
        rate_rps = rate_rps * 1.3 if high[0] == float("inf") else _between(low, high, share)
    if best is None:
        raise RuntimeError("no load was tried")
    return best


def _between(low: tuple[float, float], high: tuple[float, float], share: float) -> float:
    part = (share - low[1]) / max(high[1] - low[1], 1e-9)
    return low[0] + min(max(part, 0.15), 0.85) * (high[0] - low[0])
