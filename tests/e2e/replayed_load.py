"""A load that doubles: a router reports it to the adapter, and a simulator serves it by the replicas that were ready.

KWOK's pods serve no requests. The router is played by the test, from arrivals that are drawn once. `replay` serves
them in the simulator, which runs the router's own scheduler, by as many replicas in each second as the API server
showed ready on existing nodes; a replica takes the profiled time for a batch. Left out are the time in which a router
notices a change of its replicas, and network and CPU time beside the batches.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from tests.adapter.scenes import FakeRouter
from trimtab_adapter.simulation.environment import Environment, Failure
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, simulate

HISTORY_SECONDS = 1200
LONGEST_SECONDS = 1200
INSTANT = Environment(startup_seconds=0.0, reaction_seconds=0.0)


class ReplayedRouter(FakeRouter):
    """Reports Poisson arrivals of one rate, which doubles steadily from some moment on."""

    def __init__(self, rps: float, rise_seconds: int, seed: int) -> None:
        super().__init__()
        self._rps, self._rise_seconds, self._random = rps, rise_seconds, np.random.default_rng(seed)
        self._began = int(time.time()) - HISTORY_SECONDS
        self._set(self._drawn(np.full(HISTORY_SECONDS + LONGEST_SECONDS, rps)))

    def double(self) -> int:
        """Begin to rise at the next whole second; return its Unix time."""
        begins = int(time.time()) + 1
        past, seconds = begins - self._began, np.arange(LONGEST_SECONDS)
        rise = self._drawn(self._rps * (1.0 + np.minimum(seconds / self._rise_seconds, 1.0)))
        self._set(np.concatenate([self._arrivals[self._arrivals < past], past + rise]))
        return begins

    def arrivals(self, begin: float, seconds: float) -> NDArray[np.float64]:
        """Arrivals from a Unix time on, in seconds after it."""
        since = self._arrivals - (begin - self._began)
        return since[(since >= 0.0) & (since < seconds)]

    def _set(self, arrivals: NDArray[np.float64]) -> None:
        self._arrivals = arrivals
        self._counts = np.bincount(arrivals.astype(np.int64), minlength=HISTORY_SECONDS + LONGEST_SECONDS)

    def _drawn(self, rates: NDArray[np.float64]) -> NDArray[np.float64]:
        counts = self._random.poisson(rates)
        return np.sort(np.repeat(np.arange(rates.size), counts) + self._random.random(counts.sum()))

    def _load(self, request: web.Request) -> dict[str, object]:
        now, seconds = time.time(), int(request.query.get("seconds", "600"))
        past = int(now) - self._began
        current = int(np.count_nonzero((past <= self._arrivals) & (self._arrivals < now - self._began)))
        return {"now": now, "rps": self._counts[:past][-seconds:].tolist(), "current": current}


def replay(
    scenario: Scenario, serving: Sequence[tuple[float, int]], lost: Sequence[tuple[float, int]] = ()
) -> SimulationResult:
    """Run a scenario of one stage and one variant with the replicas that served.

    `serving`: Unix times and the replicas that serve from then on. `lost`: Unix times, and the replicas that die then
    with what they compute.
    """
    begin, stage = scenario.origin_seconds, scenario.plan.spec.stages[0]
    plans = {
        at: scenario.plan.with_spec(stages=(stage.replace(replicas=count),))
        for at, count in _by_second(serving, begin, scenario.duration_seconds)
    }
    deaths = tuple(Failure(at - begin, stage.name) for at, count in lost for _ in range(count))
    return simulate(
        replace(
            scenario,
            plan=plans.pop(0.0),
            changes=tuple(plans.items()),
            environment=replace(INSTANT, failures=deaths),
        )
    )


def _by_second(serving: Sequence[tuple[float, int]], begin: float, seconds: float) -> Iterator[tuple[float, int]]:
    """The fewest replicas that served in each second of a window, if they differ from those of the second before."""
    before, known = -1, sorted(serving)
    for second in np.arange(seconds):
        starts, ends = begin + second, begin + second + 1.0
        at_start = [count for at, count in known if at <= starts][-1:]
        within = [count for at, count in known if starts < at < ends]
        count = min(at_start + within, default=0)
        if count != before:
            yield float(second), count
            before = count
