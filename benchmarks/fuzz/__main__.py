"""`python -m benchmarks.fuzz --seed N --requests N`: generated requests against decoders, door, router and models.

Every request is drawn from the seed and its own number alone: `--show "REST bodies/12340"` prints one again.
One line of JSON at the end.
"""

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.fuzz.parts import PARTS, Fuzzed, groups, request
from benchmarks.hostile.__main__ import aftermath
from benchmarks.hostile.course import HOSTILE_NICENESS, friends
from benchmarks.hostile.door import SLO_SECONDS, Door, serving
from benchmarks.hostile.kinds import NOTHING
from benchmarks.hostile.phases import CALM, Phase, Seen, by_kind, read
from benchmarks.hostile.report import STOP_SHARE, Aftermath, accompanied
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

CALLERS = 6
WARM_UP_SHARE = 0.1
MOST_GROWTH = 0.05
GROUP_SECONDS = 120.0


async def fuzz(door: Door, seed: int, requests: int, progress: Progress) -> Fuzzed:
    """Send them all with a few callers at once; measure memory after a tenth and at the end."""
    os.setpriority(os.PRIO_PROCESS, 0, HOSTILE_NICENESS)
    found, processes = Fuzzed(), door.processes()
    task = progress.add_task("fuzzing", total=requests)
    waiting = list(groups(requests))
    warm = int(WARM_UP_SHARE * len(waiting))
    await _all(door, seed, waiting[:warm], found, lambda n: progress.advance(task, n))
    before = await memory_bytes(processes)
    await _all(door, seed, waiting[warm:], found, lambda n: progress.advance(task, n))
    after = await memory_bytes(processes)
    found.memory_bytes = {name: (size, after.get(name, 0)) for name, size in before.items()}
    found.ended = [name for name, pid in processes.items() if door.processes().get(name) != pid]
    return found


async def _all(
    door: Door, seed: int, waiting: list[tuple[str, range]], found: Fuzzed, advance: Callable[[int], None]
) -> None:
    turns = iter(waiting)

    async def caller() -> None:
        for part, numbers in turns:
            drawn = [request(seed, part, number) for number in numbers]
            try:
                codes = await asyncio.wait_for(PARTS[part].meet(door, drawn), GROUP_SECONDS)
            except (OSError, TimeoutError) as error:
                codes = [f"{NOTHING}: {type(error).__name__}"] * len(drawn)
            found.note(part, numbers.start, codes)
            advance(len(numbers))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def memory_bytes(processes: dict[str, int]) -> dict[str, int]:
    """What each process holds now: the median of a second."""
    held: dict[str, list[int]] = {name: [] for name in processes}
    for _ in range(5):
        await asyncio.sleep(0.2)
        for name, pid in processes.items():
            if psutil.pid_exists(pid):
                held[name].append(psutil.Process(pid).memory_info().rss)
    return {name: int(statistics.median(sizes)) for name, sizes in held.items() if sizes}


def outcome(found: Fuzzed, seen: Seen, after: Aftermath, seed: int, seconds: float) -> ResultLine:
    """Judge a run of so many seconds; nothing holds of one in which nothing was sent."""
    requests = sum(codes.total() for codes in found.codes.values())
    figures: dict[str, float | int | str | None] = {
        "seed": seed,
        "requests": requests,
        "faults": len(found.faults),
        "ended": "; ".join(after.faults),
        "first_faults": "; ".join(found.first_faults),
        "friendly_requests": seen.sent,
        "friendly_not_ok": seen.not_ok,
        "friendly_left_to_the_machine": seen.left_to_the_machine,
        "friendly_p99_seconds": round(seen.quantile_seconds(0.99), 4),
        **{f"{who}_rss_mib": round(end / 2**20, 1) for who, (_, end) in found.memory_bytes.items()},
    }
    bars = [
        threshold("generated requests", requests, ">=", 1),
        accompanied(seen, seconds),
        threshold("processes weighed", len(found.memory_bytes), ">=", 1),
        threshold("requests that met a fault of ours", len(found.faults), "==", 0),
        threshold("processes that ended", max(len(found.ended), len(after.faults)), "==", 0),
        threshold("friendly requests not ok", seen.not_ok, "==", 0),
        threshold(
            "longest stop of the router's loop, seconds",
            round(seen.longest_stop_seconds, 4),
            "<=",
            STOP_SHARE * SLO_SECONDS,
        ),
        *_growth(found),
        threshold("received less ok, late, dropped, refused and failed", after.received - after.accounted, "==", 0),
        threshold("bytes in flight afterwards", after.bytes_in_flight, "==", 0),
        threshold("connections open afterwards", after.open_connections, "==", 0),
    ]
    return ResultLine(name="fuzz", figures=figures, bars=tuple(bars))


def _growth(found: Fuzzed) -> list[Threshold]:
    return [
        threshold(f"memory of {who} after all over that after a tenth", round(end / begin, 3), "<=", 1 + MOST_GROWTH)
        for who, (begin, end) in found.memory_bytes.items()
    ]


def table(found: Fuzzed) -> Table:
    """How each part was met."""
    page = Table(title="generated requests")
    for column in ("part", "requests", "met"):
        page.add_column(column, overflow="fold", justify="right" if column == "requests" else "left")
    for part, codes in found.codes.items():
        page.add_row(part, f"{codes.total()}", ", ".join(f"{n} × {code}" for code, n in codes.most_common(14)))
    return page


async def run(given: argparse.Namespace) -> ResultLine:
    """Serve, fuzz, judge."""
    log = given.out / "fuzz-friends.jsonl"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with serving() as door:
        with Progress(*columns, console=console, transient=True) as progress:
            async with friends(door, log):
                began = time.monotonic()
                found = await fuzz(door, given.seed, given.requests, progress)
                phase = Phase(CALM, began, time.monotonic())
        after = await aftermath(door)
    console.print(table(found))
    seen = by_kind(read(log), [phase], SLO_SECONDS)[CALM]
    return outcome(found, seen, after, given.seed, phase.ended - phase.began)


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--show", metavar="PART/NUMBER", help="print a request as a fault names it, and send nothing")
    given = parser.parse_args()
    if given.show:
        part, _, number = given.show.rpartition("/")
        print(request(given.seed, part, int(number)))
        return 0
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # writes to connections that were cut are no news
    given.out.mkdir(parents=True, exist_ok=True)

    def judged() -> int:
        found = asyncio.run(run(given))
        found.print()
        return 0 if found.holds else 1

    return run_reporting_errors(judged)


if __name__ == "__main__":
    sys.exit(main())
