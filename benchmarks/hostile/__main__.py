"""`python -m benchmarks.hostile`: what hostile callers meet, and what friendly ones notice beside them."""

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress

from benchmarks.hostile.course import friends, run
from benchmarks.hostile.door import SLO_SECONDS, Door, serving
from benchmarks.hostile.families import KINDS
from benchmarks.hostile.kinds import Kind, Verdict
from benchmarks.hostile.phases import by_kind, read
from benchmarks.hostile.report import Aftermath, outcome, table
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.router_metrics import BYTES_IN_FLIGHT

LEAVE_WITHIN_SECONDS = 10.0


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.hostile", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="kinds whose name has this in it")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--list", action="store_true", help="print the kinds and do nothing")
    given = parser.parse_args()
    kinds = [
        kind for kind in KINDS if not given.only or any(part in f"{kind.family}: {kind.name}" for part in given.only)
    ]
    if given.list or not kinds:
        print(*(f"{kind.family}: {kind.name}" for kind in KINDS), sep="\n")
        return 0 if given.list else 2
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # writes to connections that were cut are no news
    given.out.mkdir(parents=True, exist_ok=True)
    return run_reporting_errors(lambda: _judged(asyncio.run(hostile(kinds, given.out))))


async def hostile(kinds: list[Kind], out: Path) -> ResultLine:
    """Serve, be hostile and friendly, judge."""
    log = out / "hostile-friends.jsonl"
    async with serving() as door:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("hostile", total=len(kinds))

            def tell(kind: Kind, verdict: Verdict) -> None:
                progress.console.print(f"{kind.family}: {kind.name}: {verdict}{'' if verdict.holds else '  NOT RIGHT'}")
                progress.advance(task)

            async with friends(door, log):
                course = await run(door, kinds, tell)
        after = await aftermath(door)
    seen = by_kind(read(log), course.phases, SLO_SECONDS)
    console.print(table(kinds, course, seen))
    return outcome(course, seen, door.limits_bytes, after)


async def aftermath(door: Door) -> Aftermath:
    """Wait until all have left, then count what is left of them."""
    give_up = time.monotonic() + LEAVE_WITHIN_SECONDS
    while time.monotonic() < give_up:
        left = await _left(door)
        if not (left.bytes_in_flight or left.open_connections or left.received - left.accounted):
            break
        await asyncio.sleep(0.2)
    return left


async def _left(door: Door) -> Aftermath:
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
        text = (await client.get(f"{door.admin}/metrics")).text
    counters = await door.local.client.counters()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    in_flight = sum(sample.value for sample in samples if sample.name == BYTES_IN_FLIGHT)
    faults = tuple(f"{fault.what} {fault.detail}".strip() for fault in door.local.faults)
    return Aftermath(int(in_flight), door.connections(), counters.received, sum(counters.outcomes.values()), faults)


def _judged(found: ResultLine) -> int:
    found.print()
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
