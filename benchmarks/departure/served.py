"""The same stage behind a real router: requests over HTTP, and a replica over HTTP that takes each point's seconds."""

import asyncio
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.departure.orders import Setting, arrivals, policy_of, seconds_of
from tests.router.fakes import FakeReplica, Rig, a_request, a_rig

SLOWER = 10.0
"""Everything takes so many times longer than simulated: what the machine does meanwhile weighs little."""


@dataclass(frozen=True, slots=True)
class Served:
    """What became of the requests of one order."""

    requests: int
    dropped: float  # share, refused ones among them
    late: float  # share
    accuracy: float  # mean of the answers; NaN where there are none


async def served(order: str, rate_rps: float, seconds: float) -> Served:
    """Offer a load in open loop; the rate is that of the simulation, the router sees it slowed down."""
    setting = Setting.of(SLOWER)
    replica = FakeReplica(seconds=lambda point, rows: SLOWER * seconds_of(point, rows))
    async with a_rig(
        setting.pipeline, {"stage-0": [replica]}, policy=policy_of(order, SLOWER), **setting.planned
    ) as rig:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        sent: list[asyncio.Task[float | None]] = []
        for at in arrivals(rate_rps, seconds):
            await asyncio.sleep(max(0.0, begin + SLOWER * float(at) - loop.time()))
            sent.append(asyncio.ensure_future(_ask(rig)))
        accuracies = [accuracy for accuracy in await asyncio.gather(*sent) if accuracy is not None]
        outcomes = await rig.outcomes()
    count = len(sent)
    missing = partial(_share, outcomes, count)
    accuracy = float(np.mean(accuracies)) if accuracies else float("nan")
    return Served(count, missing("dropped") + missing("refused"), missing("late"), accuracy)


async def _ask(rig: Rig) -> float | None:
    """Send one request; the accuracy expected of its answer, None where there was none."""
    status, answer, _ = await rig.rest(a_request())
    return float(answer.parameters["trimtab.expected_accuracy"]) if status == 200 else None


def _share(outcomes: dict[str, int], count: int, name: str) -> float:
    return outcomes.get(name, 0) / count
