"""Breaks one part of a running cluster after the other, under steady load: what users saw, and how soon all was well.

`python -m benchmarks.cluster.faults` prints a table; requests fail only where the fault held them in its hands.
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cluster import breaking, doors
from benchmarks.cluster.breaking import PATIENCE_SECONDS, Fault
from benchmarks.cluster.observing import NotYetError, Watched, until, watching
from benchmarks.cluster.retrying import Retried, retrying
from benchmarks.cluster.setting import ROOT, Setting, console, pipeline_document, prepared
from benchmarks.cluster.storage import drop_minio, stored_pipeline
from benchmarks.cluster.traffic import demand_within, free_cores, send
from trimtab.app import run_reporting_errors
from trimtab.local.load_process import LoadOptions
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

READY_SECONDS = 900.0
CALM_SECONDS = 5.0
LOAD_SHARE = 0.2
WIDE = Console(stderr=True, width=140)
FAULTS = (
    Fault("delete a model pod", breaking.delete_model_pod),
    Fault("delete a model pod where all is full", breaking.on_full_nodes(breaking.delete_model_pod)),
    Fault("delete a router pod", breaking.delete_router_pod, holds_requests=True),
    Fault("restart the routers", doors.restart_routers),
    Fault("kill the doors", doors.kill_doors, holds_requests=True),
    Fault("kill the operator", breaking.kill("app.kubernetes.io/component=operator")),
    Fault("kill the adapter", breaking.kill("app.kubernetes.io/component=adapter")),
    Fault("kill Prometheus", breaking.kill("app=prometheus")),
    Fault("restart the API server", breaking.restart_api_server),
    Fault("delete a Deployment", breaking.delete_deployment),
    Fault("a broken plan", breaking.break_plan),
    Fault("an image that does not exist", breaking.apply_missing_image),
    Fault("drop MinIO", drop_minio),
)


@dataclass(frozen=True, slots=True)
class Suffered:
    """What a fault did to users."""

    fault: Fault
    results: Results
    retried: Retried
    recovery_seconds: float

    def count(self, outcome: RequestOutcome) -> int:
        """Count the requests that ended so."""
        return self.results.count(outcome)


async def faults(given: argparse.Namespace) -> ResultLine:
    """Break everything, one after the other."""
    suffered: list[Suffered] = []
    chosen = named(given.only or [])
    name = load_pipeline(given.pipeline).name
    async with prepared(build=not given.no_build) as setting, watching(setting, name) as watched:
        document = pipeline_document(given.pipeline, setting.namespace)
        document["spec"]["router"] = {"replicas": 2}
        await setting.apply(document)
        await watched.ready(READY_SECONDS)
        if any(fault.strike is drop_minio for fault in chosen):
            await stored_pipeline(setting, given.pipeline)
        rps = await _steady(setting, watched, given.pipeline)
        console.print(f"{rps:.3g} requests a second")
        for fault in chosen:
            suffered.append(await _suffer(fault, watched, given, rps))
            WIDE.print(_table(suffered[-1:]))
            _tell_failures(suffered[-1].results)
    WIDE.print(_table(suffered))
    return outcome_of(suffered, rps)


def named(words: list[str]) -> list[Fault]:
    """The faults whose name has one of these words; without words all.

    Raises:
        UsersMistake: no fault's name has one of them.
    """
    for word in words:
        if not any(word in fault.name for fault in FAULTS):
            known = "; ".join(fault.name for fault in FAULTS)
            raise UserError(f"--only {word}: no fault has it in its name; there are: {known}")
    return [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]


async def _steady(setting: Setting, watched: Watched, pipeline_file: Path) -> float:
    """A load that one replica a stage carries with ease."""
    pipeline, profiles = load_pipeline(pipeline_file), await watched.profiles()
    return LOAD_SHARE * demand_within(pipeline, profiles, await free_cores(setting)).high_rps


async def _suffer(fault: Fault, watched: Watched, given: argparse.Namespace, rps: float) -> Suffered:
    """Send the load, strike after some calm, and wait for both the load's end and the recovery."""
    console.print(fault.name)
    await until(watched.is_ready, "Ready before the next fault", PATIENCE_SECONDS)
    access = watched.setting.credentials.access()
    order = LoadOptions(f"constant:{rps:.3g}", duration_seconds=given.seconds, seed=given.seed, access=access)

    begun = asyncio.Event()

    async def strike() -> float:
        await begun.wait()
        await asyncio.sleep(CALM_SECONDS)
        try:
            return await breaking.seconds_of(fault, watched)
        except NotYetError as error:
            console.print(f"[red]{error}[/red]")
            return float("inf")

    async with retrying(watched) as retried:
        results, recovery = await asyncio.gather(send(given.pipeline, watched.address, order, begun), strike())
    return Suffered(fault, results, retried, recovery)


def _tell_failures(results: Results) -> None:
    """Say of each request that failed when it was sent, with what it ended and when."""
    for record in results.records[results.records["outcome"] == RequestOutcome.FAILED]:
        code, detail, sent_at, after = (record[name] for name in ("code", "detail", "sent", "latency_seconds"))
        console.print(f"[red]failed:[/red] sent at {sent_at:.2f} s, after {after:.3f} s {code} {detail}")


def _table(suffered: list[Suffered]) -> Table:
    ends = [outcome.word for outcome in RequestOutcome]
    table = Table("fault", *ends, "retrying clients: answered/lost", "recovery, s")
    for each in suffered:
        counts = [str(each.count(outcome)) for outcome in RequestOutcome]
        retried = f"{each.retried.answered}/{each.retried.lost}"
        table.add_row(each.fault.name, *counts, retried, f"{each.recovery_seconds:.1f}")
    return table


def outcome_of(suffered: list[Suffered], rps: float) -> ResultLine:
    """Judge what users suffered; without a fault nothing holds."""
    figures: dict[str, float | int | str | None] = {"load_rps": rps}
    bars: list[Threshold] = [threshold("faults struck", len(suffered), ">=", 1)]
    for each in suffered:
        key = each.fault.name.replace(" ", "_")
        figures |= {f"{key}_{outcome.word}": each.count(outcome) for outcome in RequestOutcome}
        recovery = each.recovery_seconds
        figures[f"{key}_recovery_seconds"] = round(recovery, 2) if recovery < float("inf") else None
        if not each.fault.holds_requests:
            bars.append(threshold(f"{each.fault.name}: failed", each.count(RequestOutcome.FAILED), "==", 0))
        bars.append(threshold(f"{each.fault.name}: answered in time", each.count(RequestOutcome.OK), ">=", 1))
        bars.append(threshold(f"{each.fault.name}: lost by clients that retry", each.retried.lost, "==", 0))
        bars.append(threshold(f"{each.fault.name}: recovery, seconds", recovery, "<=", PATIENCE_SECONDS))
    return ResultLine(name="chaos-cluster", figures=figures, bars=tuple(bars))


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.cluster.faults", description=__doc__)
    parser.add_argument("--pipeline", type=Path, default=ROOT / "pipelines" / "digits" / "pipeline.yaml")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load for each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="words in the names of the faults to run; default: all")
    parser.add_argument("--no-build", action="store_true", help="the node's images are as they should be")
    return run_reporting_errors(partial(_judged, parser.parse_args()))


def _judged(given: argparse.Namespace) -> int:
    outcome = asyncio.run(faults(given))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
