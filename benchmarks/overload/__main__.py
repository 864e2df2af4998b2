"""Overload benchmark: offers 3 and 10 times what a target can serve, and prints the share of its goodput that remains.

A target's maximum is the best goodput at any offered rate over the same connections. It is measured before and after
each overload, and the remaining share is of the mean of both, because the machine's speed changes. Latency counts from
the time that a request was due. The router and the model servers run on one core, the generator on the other, the proxy
on any but the first. The figures include the generator's CPU usage: if it fills its core, it offers too little.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.harness.report import Figure, Report
from benchmarks.overload.driver import (
    GRPC_FEW,
    GRPC_MANY,
    MODEL_BOUND_BATCH,
    NEIGHBOURS,
    REST_FEW,
    REST_MANY,
    ROUTER_BOUND_BATCH,
    Case,
    CpuUsage,
    Generator,
    Target,
    generator,
    neighbours,
    serve_echo,
    watch_cpu,
)
from benchmarks.overload.outcomes import OfferSummary
from trimtab.options import console

ALL_CASES = (REST_FEW, REST_MANY, GRPC_FEW, GRPC_MANY)
MIN_KEPT = {3.0: 0.9, 10.0: 0.8}
"""Least remaining share of the maximum by offered multiple; between them the lower one."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The target in one situation, and the cases to run against it."""

    key: str
    title: str
    batch_size: int
    cases: tuple[Case, ...]
    neighbours: int = 0


PHASES = (
    Phase("proxy", "the router is the bottleneck", ROUTER_BOUND_BATCH, ALL_CASES),
    Phase("model", "the model is the bottleneck", MODEL_BOUND_BATCH, (REST_MANY, GRPC_FEW)),
    Phase("slowed", "core slowed to a third", ROUTER_BOUND_BATCH, ALL_CASES, neighbours=NEIGHBOURS),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Summary of one overload, with the maximum around it."""

    key: str
    max_rps: float
    summary: OfferSummary
    cpu: CpuUsage

    @property
    def kept(self) -> float:
        """Goodput under overload as a share of the maximum."""
        return round(self.summary.goodput_rps / self.max_rps, 3)

    @property
    def offered_times(self) -> float:
        return round(self.summary.offered_rps / self.max_rps, 1)

    def figures(self) -> dict[str, Figure]:
        figures: dict[str, Figure] = {
            "kept": self.kept,
            "offered_times": self.offered_times,
            **{name: value for name, value in asdict(self.summary).items() if name != "codes"},
            "others_share": self.cpu.others_share,
            **{f"{name}_cores": share for name, share in self.cpu.shares.items()},
            "maximum_rps": round(self.max_rps, 1),
            **self.summary.codes,
        }
        return {f"{self.key}_{name}": value for name, value in figures.items()}

    def line(self, phase: Phase, case: Case) -> str:
        codes = ", ".join(f"{code} {count}" for code, count in self.summary.codes.items())
        return (
            f"{phase.title}, {case.name}: {self.kept:.0%} of {self.max_rps:.0f} requests/s kept at "
            f"{self.offered_times} times; p99 {self.summary.p99_ms:.0f} ms, others {self.cpu.others_share:.0%}; {codes}"
        )


def main() -> int:
    """Run the phases; the exit code is 0 if every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each overload")
    parser.add_argument("--factors", default="3,10", help="multiples of the maximum to offer")
    parser.add_argument(
        "--phase", action="append", choices=[phase.key for phase in PHASES], help="only this; repeatable"
    )
    options = parser.parse_args()
    factors = [float(factor) for factor in options.factors.split(",")]
    phases = [phase for phase in PHASES if not options.phase or phase.key in options.phase]
    report = Report("bench-overload")
    asyncio.run(_run_phases(phases, factors, options.seconds, report))
    return report.finish()


async def _run_phases(phases: Sequence[Phase], factors: Sequence[float], seconds: float, report: Report) -> None:
    console.print("starting the generator and the first target")
    with generator() as load:
        for phase in phases:
            async with serve_echo(phase.batch_size) as target:
                with neighbours(phase.neighbours):
                    await measure(phase, target, load, factors, seconds, report)


async def measure(
    phase: Phase, target: Target, load: Generator, factors: Sequence[float], seconds: float, report: Report
) -> None:
    for case in phase.cases:
        port = target.ports[case.protocol]
        before_rps = await asyncio.to_thread(load.max_goodput_rps, case, port)
        for factor in factors:
            with watch_cpu(load.pid, target.fronts) as cpu:
                summary = await asyncio.to_thread(load.offer, case, port, factor * before_rps, seconds)
            after_rps = await asyncio.to_thread(load.recheck_max_goodput_rps, case, port, before_rps)
            after_rps = after_rps or before_rps  # a target still stuck says nothing about the machine
            max_rps, before_rps = (before_rps + after_rps) / 2, after_rps
            result = Result(f"{phase.key}_{case.protocol}_{case.connections}_{factor:g}x", max_rps, summary, cpu)
            report.add(result.figures())
            console.print(result.line(phase, case), highlight=False)
            min_kept = min(kept for offered, kept in MIN_KEPT.items() if offered <= max(factor, min(MIN_KEPT)))
            name = f"{phase.title}: {case.name}: kept of the maximum at {factor:g} times"
            report.hold(name, result.kept, ">=", min_kept)
