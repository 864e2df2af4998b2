"""Finds loads: the most a method carries with hardly any violation, and the one at which it violates so much."""

from collections.abc import Awaitable, Callable
from math import inf
from typing import Protocol, TypeVar

from benchmarks.modalities.run import Run
from benchmarks.modalities.setting import Jobs

FEW = 0.01
"""Of jobs: violations that are allowed."""
STEPS, FINENESS = 9, 1.02
LOADS_TRIED = 5
Tell = Callable[[Run], None]
Found = TypeVar("Found")


class Offered(Protocol):
    """What takes loads."""

    async def offer(self, jobs: Jobs, jobs_rps: float, seconds: float, seed: int = 1) -> Run:
        """Offer one."""


async def most_carried(
    offer: Callable[[float], Awaitable[Run]], first_rps: float, *, fineness: float = FINENESS
) -> Run:
    """The run of most load with hardly any violation, found by larger steps, then within `fineness`.

    Raises:
        RuntimeError: even little load is violated.
    """
    best: Run | None = None
    rate_rps, least, too_much = first_rps, 0.0, float("inf")
    for _ in range(STEPS):
        run = await offer(rate_rps)
        if run.violations <= FEW:
            best, least = run, rate_rps
        else:
            too_much = rate_rps
        if best is not None and too_much / least < fineness:
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
    """The run in which about this share of jobs is violated, sought from a load that is just carried."""

    async def offer(rate_rps: float, _: int) -> Run:
        run = await serving.offer(jobs, rate_rps, seconds)
        tell(run)
        return run

    runs = await sought(offer, lambda run: run.violations, share, carried_rps / (1.0 - share), carried_rps=carried_rps)
    return runs[-1]


async def sought(
    offer: Callable[[float, int], Awaitable[Found]],
    spoilt: Callable[[Found], float],
    share: float,
    first_rps: float,
    *,
    carried_rps: float = 0.0,
    close: float = 0.02,
    tries: int = LOADS_TRIED,
) -> list[Found]:
    """Offer loads until about this share of one is spoilt, by regula falsi.

    Args:
        offer: takes the rate and the number of the try, which begins with 1.
        spoilt: the share of a load that was.
        share: what it should be.
        first_rps: where to begin.
        carried_rps: a rate known to spoil nothing.
        close: how near is near enough.
        tries: loads offered at most.

    Returns:
        All that came of it; last the one that is nearest.
    """
    runs: list[Found] = []
    rate_rps, low, high = first_rps, (carried_rps, 0.0), (inf, 1.0)
    for number in range(1, tries + 1):
        runs.append(await offer(rate_rps, number))
        found = spoilt(runs[-1])
        if abs(found - share) <= close:
            break
        low, high = ((rate_rps, found), high) if found < share else (low, (rate_rps, found))
        if high[0] < inf:
            rate_rps = _between(low, high, share)
        else:
            rate_rps *= 1.3 if found > share / 4 else 2.0  # far below it says nothing of how far
    return sorted(runs, key=lambda run: -abs(spoilt(run) - share))


def _between(low: tuple[float, float], high: tuple[float, float], share: float) -> float:
    part = (share - low[1]) / max(high[1] - low[1], 1e-9)
    return low[0] + min(max(part, 0.15), 0.85) * (high[0] - low[0])
