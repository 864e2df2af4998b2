"""Is a departure better decided at once? One stage, two operating points, rising load. The last line is JSON.

The same arrivals meet several orders of decisions: rows and drops fixed at the planned point and the point chosen
after; one point alone, the planned or the cheaper one; point, rows and drops in one decision. Simulated over many
loads, served at one. Where the cheaper point carries the load with as much to spare, one decision drops nobody.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.departure.orders import CARRIED_RPS, CHEAPER, NEW, OLD, ORDERS, SERVED, simulated
from benchmarks.departure.page import HEADS, Curves, Points, dropped, render, rows
from benchmarks.departure.served import served
from trimtab.app import reporting_errors
from trimtab.options import console
from trimtab.plan_view import terminal_table
from trimtab.report.summary import Card
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.result_line import ResultLine, threshold

RATES_RPS = (10.0, 30.0, 50.0, 70.0, 100.0, 150.0, 200.0, 250.0, 300.0, 350.0, 400.0, 450.0)
HARD_RPS = 150.0
"""More than twice what the planned point can carry, less than half of what the cheaper one can."""
MOST_UNSERVED = 0.01
"""Of requests: near what the cheaper point can carry, and served, where the machine's own pauses cost some too."""


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.departure", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of load, simulated; a quarter is served")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    curves = {order: {rate: simulated(order, rate, given.seconds) for rate in RATES_RPS} for order in ORDERS}
    points = asyncio.run(_served(given.seconds / 4.0))
    console.print(terminal_table(HEADS, rows(points), "served"))
    outcome = judged(curves, points)
    given.out.mkdir(parents=True, exist_ok=True)
    page = given.out / "departure.html"
    write_atomically(page, render(curves, points, _cards(outcome)))
    console.print(f"page: {page}")
    for each in outcome.bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.4g} {each.bound}")
    outcome.print()
    return 0 if outcome.holds else 1


async def _served(seconds: float) -> Points:
    return {order: {HARD_RPS: await served(order, HARD_RPS, seconds)} for order in SERVED}


def judged(curves: Curves, points: Points) -> ResultLine:
    """Hold the orders against each other."""
    carried = [rate for rate, one in curves[CHEAPER].items() if not dropped(one)]
    easily = [rate for rate in RATES_RPS if rate <= CARRIED_RPS["half"] / 2]
    figures: dict[str, float | int | str | None] = {}
    for order, runs in curves.items():
        for rate, one in runs.items():
            figures[f"simulated, {order}, {rate:g}/s: dropped"] = dropped(one)
            figures[f"simulated, {order}, {rate:g}/s: accuracy"] = one.mean_accuracy
    for order, kept in points.items():
        for rate, run in kept.items():
            figures[f"served, {order}, {rate:g}/s: dropped"] = run.dropped
            figures[f"served, {order}, {rate:g}/s: late"] = run.late
            figures[f"served, {order}, {rate:g}/s: accuracy"] = run.accuracy
    unserved = max(run.dropped + run.late for run in points[NEW].values())
    bars = (
        threshold("dropped by the old order, simulated", dropped(curves[OLD][HARD_RPS]), ">=", 0.2),
        threshold("dropped by one decision, simulated", dropped(curves[NEW][HARD_RPS]), "==", 0.0),
        threshold("most dropped at up to half of what the cheaper point can carry", _most(curves, easily), "==", 0.0),
        threshold(
            "most dropped where the cheaper point alone drops nobody", _most(curves, carried), "<=", MOST_UNSERVED
        ),
        threshold("accuracy with time to spare, simulated", curves[NEW][RATES_RPS[0]].mean_accuracy, ">=", 0.85),
        threshold("dropped by the old order, served", points[OLD][HARD_RPS].dropped, ">=", 0.2),
        threshold("dropped or late by one decision, served", unserved, "<=", MOST_UNSERVED),
    )
    return ResultLine(name="bench-departure", figures=figures, bars=bars)


def _most(curves: Curves, rates_rps: Iterable[float]) -> float:
    return max(dropped(curves[NEW][rate]) for rate in rates_rps)


def _cards(outcome: ResultLine) -> list[Card]:
    return [Card(each.bar, f"{each.value:.3g}", each.bound, each.holds) for each in outcome.bars]


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
