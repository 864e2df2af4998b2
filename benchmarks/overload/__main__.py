"""`python -m benchmarks.overload`: offers 3 and 10 times what a target can do; a table, then one line of JSON.

A target's maximum is the most answers in time at any offered rate, over the same connections; it is measured before
and after each overload, and what was kept is a share of the mean of both, since machines become faster and slower.
Latency runs from the moment a request was due. Router and model servers have one core, the generator the other, and
the door any but the first; `others` is what processes that are none of these took of the servers' core.
What generator, door and router took is among the figures: a generator that fills its core offers less than it says.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

from benchmarks.overload.board import Tally
from benchmarks.overload.core import watching
from benchmarks.overload.driving import (
    GRPC_MANY,
    GRPC_SEVERAL,
    REST_MANY,
    REST_SEVERAL,
    Case,
    Generator,
    generator,
)
from benchmarks.overload.targets import LARGE_BATCH, NEIGHBOURS, SMALL_BATCH, Target, mlserver, neighbours, trimtab
from trimtab.app import run_reporting_errors
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

Figures = dict[str, float | int | str | None]
DOOR_CASES = (REST_SEVERAL, REST_MANY, GRPC_SEVERAL, GRPC_MANY)
KEPT_AT_LEAST = {3.0: 0.9, 10.0: 0.8}
"""Of the maximum, by how often it is offered; between them the lower holds."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One target in one situation, and the ways to knock at it."""

    key: str
    title: str
    run: Callable[..., AbstractAsyncContextManager[Target]]
    batch_size: int
    cases: tuple[Case, ...]
    bounded: bool = True
    neighbours: int = 0
    barred: bool = True
    """Whether its figures are held to the bars; else they are for comparison."""


PHASES = (
    Phase("door", "the router gives out", trimtab, LARGE_BATCH, DOOR_CASES),
    Phase("model", "the model gives out", trimtab, SMALL_BATCH, (REST_MANY, GRPC_SEVERAL)),
    Phase("slowed", "core slowed to a third", trimtab, LARGE_BATCH, DOOR_CASES, neighbours=NEIGHBOURS),
    Phase(
        "onecore", "door on the router's core", partial(trimtab, one_core=True), LARGE_BATCH, DOOR_CASES, barred=False
    ),
    Phase("open", "without the door's bounds", trimtab, LARGE_BATCH, (REST_MANY,), bounded=False, barred=False),
    Phase("mlserver", "plain MLServer, one stage", mlserver, LARGE_BATCH, (GRPC_SEVERAL,), barred=False),
)
HEADER = ("situation", "callers", "maximum/s", "offered/s", "times", "kept", "p99 ms", "others", "answers")
ROW = "{:27}{:33}{:>10}{:>11}{:>7}{:>7}{:>9}{:>8}  {}\n"


@dataclass(frozen=True, slots=True)
class Found:
    """What one overload came to, beside the maximum before it."""

    key: str
    maximum_rps: float
    tally: Tally
    others_share: float
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def kept(self) -> float:
        """The share of the maximum that was still answered in time."""
        return round(self.tally.goodput_rps / self.maximum_rps, 3)

    @property
    def offered_times(self) -> float:
        """How often the maximum was offered, as measured."""
        return round(self.tally.offered_rps / self.maximum_rps, 1)

    def figures(self) -> Figures:
        """Figures with units in their names."""
        tally = self.tally
        own: Figures = {
            "kept": self.kept,
            "offered_rps": tally.offered_rps,
            "offered_times": self.offered_times,
            "goodput_rps": tally.goodput_rps,
            "p50_ms": tally.p50_ms,
            "p99_ms": tally.p99_ms,
            "lag_p99_ms": tally.lag_p99_ms,
            "others_share": self.others_share,
            **{f"{name}_cores": share for name, share in self.shares.items()},
            "maximum_rps": round(self.maximum_rps, 1),
        }
        return {f"{self.key}_{name}": value for name, value in (own | dict(tally.codes)).items()}

    def row(self, phase: Phase, case: Case) -> str:
        """A line of the table."""
        return ROW.format(
            phase.title,
            case.name,
            f"{self.maximum_rps:.0f}",
            f"{self.tally.offered_rps:.0f}",
            self.offered_times,
            f"{self.kept:.0%}",
            f"{self.tally.p99_ms:.0f}",
            f"{self.others_share:.0%}",
            ", ".join(f"{code} {count}" for code, count in self.tally.codes.items()),
        )


def main() -> int:
    """Run the phases asked for; the exit code is 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each overload")
    parser.add_argument("--factors", default="3,10", help="multiples of the maximum to offer")
    parser.add_argument(
        "--phase", action="append", choices=[phase.key for phase in PHASES], help="only this; repeatable"
    )
    given = parser.parse_args()
    return run_reporting_errors(lambda: asyncio.run(_overload(given)))


async def _overload(given: argparse.Namespace) -> int:
    factors = tuple(float(factor) for factor in given.factors.split(","))
    sys.stdout.write(ROW.format(*HEADER))
    sys.stdout.flush()
    figures: Figures = {}
    bars: list[Threshold] = []
    with generator() as load:
        for phase in PHASES:
            if not given.phase or phase.key in given.phase:
                await _measure(phase, load, factors, given.seconds, figures, bars)
    outcome = ResultLine(name="bench-overload", figures=figures, bars=tuple(bars))
    outcome.print()
    return 0 if outcome.holds else 1


async def _measure(
    phase: Phase, load: Generator, factors: tuple[float, ...], seconds: float, figures: Figures, bars: list[Threshold]
) -> None:
    async with phase.run(phase.batch_size, bounded=phase.bounded) as target:
        with neighbours(phase.neighbours):
            for case in phase.cases:
                port = target.ports[case.speech]
                key = f"{phase.key}_{case.speech}_{case.connections}"
                before_rps = (await asyncio.to_thread(load.maximum, case, port)).goodput_rps
                for factor in factors:
                    with watching(load.pid, target.fronts) as core:
                        tally = await asyncio.to_thread(load.offer, case, port, factor * before_rps, seconds)
                    after_rps = await asyncio.to_thread(load.maximum_now, case, port, before_rps)
                    after_rps = after_rps or before_rps  # a flood that is still worked off says nothing of the machine
                    maximum_rps, before_rps = (before_rps + after_rps) / 2, after_rps
                    found = Found(f"{key}_{factor:g}x", maximum_rps, tally, core.others_share, core.shares)
                    figures |= found.figures()
                    sys.stdout.write(found.row(phase, case))
                    sys.stdout.flush()
                    if phase.barred:
                        name = f"{phase.title}: {case.name}: kept of the maximum at {factor:g} times"
                        bars.append(threshold(name, found.kept, ">=", _least(factor)))


def _least(factor: float) -> float:
    return min(least for known, least in KEPT_AT_LEAST.items() if known <= max(factor, min(KEPT_AT_LEAST)))


if __name__ == "__main__":
    sys.exit(main())
