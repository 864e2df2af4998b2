"""From `helm install` to a pipeline that adapts in real pods: all of Trimtab in a real cluster, with its figures.

`python -m benchmarks.cluster.e2e` brings up what is missing, serves the digits pipeline under a load that rises and
falls for three minutes, through TLS and with keys, both of which are replaced meanwhile, lets a stranger try the doors,
asks every query of the dashboards, opens the live page, changes plans by hand to time them, serves lmm-digits in its
place, whole and parted, and chats with it, serves digits-av and asks it with and without senses, and builds a user's
image upon ours.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from benchmarks.cluster.changing import adapter_away, batch_changes, separate, variant_change
from benchmarks.cluster.chatting import LAYOUTS, chatted
from benchmarks.cluster.observing import Watched, changes, watching
from benchmarks.cluster.own_image import families_in_own_image
from benchmarks.cluster.paging import charts_shown
from benchmarks.cluster.replacing import CERTIFICATE_SECONDS, Replaced, replaced
from benchmarks.cluster.sensing import sensed
from benchmarks.cluster.setting import (
    ROOT,
    SYSTEM,
    CommandError,
    Setting,
    console,
    pipeline_document,
    prepared,
    run,
    values,
)
from benchmarks.cluster.traffic import demand_within, free_cores, send
from benchmarks.cluster.trespassing import trespassed
from trimtab.local.load_process import LoadOptions
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

READY_SECONDS = 900.0
LOAD_SECONDS = 180.0
IN_FORCE_SECONDS = 0.1
REVOKED_SECONDS = 5.0
CALM_SHARE = 0.1
"""Of the load, before each time that certificate and key are replaced: at low load as at high."""
FAILED, UNACCOUNTED = "failed requests", "received - ok - late - dropped - refused - failed"
UNANSWERED = "dashboard expressions without data"
NOTICED = "requests of the second caller without an answer"
CERTIFICATE, REVOKED = "new certificate written to served, seconds", "key revoked to refused, seconds"
LET_IN, REACHED = "ways in without a credential", "ports reached from another namespace, where policies are enforced"
CHARTS, FAMILIES = "charts on the live page of the pipeline", "families in an image built from ours"
WRONG_CHATS, LOST_CHATS = "chats answered wrongly, whole or streamed", "chats received - ok"
WRONG_JOBS = "jobs of digits-av whose answers cannot be, by their points, confidences or floors"
RIGHT_ROWS = "rows of digits-av answered rightly, share"
FUNCTIONAL = frozenset(
    {
        *(FAILED, UNACCOUNTED, UNANSWERED, NOTICED, CERTIFICATE, REVOKED, LET_IN, REACHED, CHARTS, FAMILIES),
        *(WRONG_CHATS, LOST_CHATS, WRONG_JOBS, RIGHT_ROWS),
    }
)
"""Bars that hold on any machine, however slow or busy with other work."""
PLATEAU_SECONDS = 25
RIGHT_SHARE = 0.55
"""Of rows of digits-av, a third of whose jobs lack the sense that tells most; by chance it would be a tenth."""


@dataclass(slots=True)
class Findings:
    """What a run came to, step by step."""

    figures: dict[str, float | int | str | None] = field(default_factory=dict)
    bars: list[Threshold] = field(default_factory=list)

    def note(self, **figures: float | str | None) -> None:
        """Keep figures and tell them."""
        self.figures.update(figures)
        for name, value in figures.items():
            console.print(f"  {name}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}")


async def e2e(given: argparse.Namespace) -> ResultLine:
    """Do it all."""
    findings = Findings()
    began = time.monotonic()
    async with prepared(build=not given.no_build) as setting:
        findings.note(prepare_seconds=time.monotonic() - began)
        await _manifests_are_accepted(setting, findings)
        async with watching(setting, load_pipeline(given.pipeline).name) as watched:
            await _apply(watched, given.pipeline, findings)
            await _under_load(watched, given, findings)
            await _strangers(watched, findings)
            await _dashboards(watched, findings)
            await _live_page(watched, findings)
            await _plans_by_hand(watched, findings)
            await _chats(watched, findings)
            await _senses(setting, findings)
        if setting.ours:
            await _own_image(findings)
    return ResultLine(name="e2e", figures=findings.figures, bars=tuple(findings.bars))


async def _manifests_are_accepted(setting: Setting, findings: Findings) -> None:
    """Let the API server check every manifest of the chart, without applying it."""
    chart = ("trimtab", ROOT / "charts" / "trimtab", "-n", SYSTEM, "--kube-version", "1.34.0")
    rendered = await setting.helm("template", *chart, "--set", "trainer.enabled=true", *values())
    bodies = [body for body in yaml.safe_load_all(rendered) if body]
    await setting.kubectl("apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", "-", given=rendered)
    findings.note(manifests_accepted=len(bodies))


async def _apply(watched: Watched, pipeline_file: Path, findings: Findings) -> None:
    began = time.monotonic()
    await watched.setting.apply(pipeline_document(pipeline_file, watched.setting.namespace))
    await watched.ready(READY_SECONDS)
    findings.note(apply_to_ready_seconds=time.monotonic() - began)


async def _under_load(watched: Watched, given: argparse.Namespace, findings: Findings) -> None:
    """Send the load and judge what came of it, and what changed meanwhile."""
    cores = await free_cores(watched.setting)
    demand = demand_within(load_pipeline(given.pipeline), await watched.profiles(), cores)
    findings.note(free_cores=cores, load_low_rps=demand.low_rps, load_high_rps=demand.high_rps)
    order = LoadOptions(
        demand.spec(plateau_seconds=PLATEAU_SECONDS),
        duration_seconds=given.duration,
        seed=given.seed,
        access=watched.setting.credentials.access(),
    )

    replacing = replaced(watched, given.duration * CALM_SHARE)
    async with watched.sampled():
        results, changed = await asyncio.gather(send(given.pipeline, watched.address, order), replacing)
    _judge(results, findings)
    _judge_replaced(changed, findings)
    variants, replicas = changes(watched.seen, lambda s: s.variants), changes(watched.seen, lambda s: s.pods)
    batches = changes(watched.seen, lambda s: s.batches)
    findings.note(variant_changes=variants, replica_changes=replicas, batch_changes=batches)
    findings.bars += [threshold("variant changes", variants, ">=", 2), threshold("replica changes", replicas, ">=", 1)]


def _judge(results: Results, findings: Findings) -> None:
    summary = results.summary()
    ends = {outcome.word: results.count(outcome) for outcome in RequestOutcome}
    gap = abs((summary["measured_accuracy"] or 0.0) - (summary["expected_accuracy"] or 1.0))
    findings.note(
        received=summary["received"],
        **ends,
        within_slo_fraction=summary["slo_fraction"],
        latency_p99_seconds=summary.get("latency_seconds_p99"),
        measured_accuracy=summary["measured_accuracy"],
        expected_accuracy=summary["expected_accuracy"],
        client_lateness_seconds_p99=summary["client_lateness_seconds_p99"],
    )
    for what in ("drops", "failures"):
        if summary[what]:
            console.print(f"  {what}: {summary[what]}")
    findings.bars += [
        threshold(FAILED, ends["failed"], "==", 0),
        threshold(UNACCOUNTED, summary["received"] - sum(ends.values()), "==", 0),
        threshold("|measured - expected| accuracy", gap, "<=", 0.02),
    ]


def _judge_replaced(changed: Replaced, findings: Findings) -> None:
    """Judge the slowest of each, and what the second caller met meanwhile."""
    certificate, refused = max(changed.certificate_seconds), max(changed.refused_seconds)
    met = changed.visitor
    findings.note(
        times_replaced=len(changed.refused_seconds),
        second_caller_answered=met.answered,
        second_caller_turned_away=met.turned_away,
        second_caller_failed=len(met.failed),
        certificate_served_seconds=_or_none(certificate),
        key_accepted_seconds=_or_none(max(changed.accepted_seconds)),
        revoked_key_refused_seconds=_or_none(refused),
    )
    for failure in met.failed[:10]:
        console.print(f"  second caller: {failure}")
    findings.bars += [
        threshold(NOTICED, len(met.failed), "==", 0),
        threshold(CERTIFICATE, certificate, "<=", CERTIFICATE_SECONDS),
        threshold(REVOKED, refused, "<=", REVOKED_SECONDS),
    ]


def _or_none(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


async def _strangers(watched: Watched, findings: Findings) -> None:
    """Judge what a pod of another namespace meets; which ports it reaches says something only where policies do."""
    met = await trespassed(watched)
    for how, answer in met.answers.items():
        console.print(f"  {how}: {answer}")
    findings.note(
        policies_enforced=int(met.enforced),
        ports_reached=len(met.forbidden),
        ways_in_without_credential=len(met.let_in),
    )
    findings.bars.append(threshold(LET_IN, len(met.let_in), "==", 0))
    if met.enforced:
        findings.bars.append(threshold(REACHED, len(met.forbidden), "==", 0))


async def _dashboards(watched: Watched, findings: Findings) -> None:
    """Run every query of the dashboards against what the load has left in Prometheus."""
    address = await watched.setting.address(SYSTEM, "prometheus", 9090)
    where = ("--namespace", watched.setting.namespace, "--pipeline", watched.name)
    command = (sys.executable, "-m", "benchmarks.dashboards", "--prometheus", f"http://{address}", *where)
    try:
        printed = json.loads((await run(*command)).strip().rpartition("\n")[2])["figures"]
    except CommandError as error:
        console.print(str(error))
        printed = {"expressions": math.nan, "with_data": math.nan}
    expressions, answered = printed["expressions"], printed["with_data"]
    findings.note(dashboard_expressions=expressions, dashboard_expressions_with_data=answered)
    findings.bars.append(threshold(UNANSWERED, expressions - answered, "==", 0))


async def _live_page(watched: Watched, findings: Findings) -> None:
    """Open the live page as a user would, from outside of the cluster."""
    charts = await charts_shown(watched)
    findings.note(live_page_charts=charts)
    findings.bars.append(threshold(CHARTS, charts, ">=", 1))


async def _chats(watched: Watched, findings: Findings) -> None:
    """Serve lmm-digits in the place of the pipeline watched, whole and then parted, and chat with it."""
    setting, began = watched.setting, time.monotonic()
    await setting.cluster.delete("InferencePipeline", setting.namespace, watched.name)
    met = {layout: await chatted(setting, layout) for layout in LAYOUTS}
    for layout, each in met.items():
        findings.note(
            **{f"chats_{layout}_answered": each.answers, f"chats_{layout}_to_ready_seconds": each.ready_seconds}
        )
    findings.note(chats_seconds=time.monotonic() - began)
    findings.bars.append(threshold(WRONG_CHATS, sum(each.wrong for each in met.values()), "==", 0))
    findings.bars.append(threshold(LOST_CHATS, sum(each.unaccounted for each in met.values()), "==", 0))


async def _senses(setting: Setting, findings: Findings) -> None:
    """Serve digits-av after it, and ask it for jobs with and without a sense, with and without a floor."""
    found = await sensed(setting)
    met = found.met
    for fault in met.faults[:10]:
        console.print(f"  {fault}")
    findings.note(
        senses_to_ready_seconds=found.ready_seconds,
        senses_jobs=met.jobs,
        senses_points_planned=found.planned,
        senses_points_served=", ".join(sorted(met.points)),
    )
    findings.bars.append(threshold(WRONG_JOBS, len(met.faults), "==", 0))
    findings.bars.append(threshold(RIGHT_ROWS, met.right / met.rows, ">=", RIGHT_SHARE))


async def _own_image(findings: Findings) -> None:
    """Build the image that the docs tell users to build, upon the node's own."""
    families = await families_in_own_image()
    findings.note(families_in_own_image=families)
    findings.bars.append(threshold(FAMILIES, families, ">=", 1))


async def _plans_by_hand(watched: Watched, findings: Findings) -> None:
    """Time plans from the write to the first request they can decide about."""
    async with adapter_away(watched):
        spec = load_pipeline(ROOT / "pipelines" / "digits").spec
        stage = spec.stages[-1]
        taken = await batch_changes(watched, stage.name, (stage.batch_sizes[1], stage.batch_sizes[2]))
        p50, p99 = (float(np.quantile(taken, q)) for q in (0.5, 0.99))
        findings.note(plan_changes=len(taken), batch_in_force_seconds_p50=p50, batch_in_force_seconds_p99=p99)
        findings.bars.append(threshold("plan written to batch size in force, p99 seconds", p99, "<=", IN_FORCE_SECONDS))
        runs = (await watched.state()).stages[stage.name].variant
        others = [variant.name for variant in stage.variants if variant.name != runs]
        findings.note(shared_variant_seconds=await variant_change(watched, stage.name, others[0]))
        await separate(watched)
        findings.note(separate_variant_seconds=await variant_change(watched, stage.name, others[1]))


def main() -> int:
    """Run it; 0 where every bar that counts holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.cluster.e2e", description=__doc__)
    parser.add_argument("--pipeline", type=Path, default=ROOT / "pipelines" / "digits" / "pipeline.yaml")
    parser.add_argument("--duration", type=float, default=LOAD_SECONDS, help="seconds of load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-build", action="store_true", help="the node's images are as they should be")
    parser.add_argument(
        "--functional", action="store_true", help="let only the bars that no busy machine can miss decide the exit code"
    )
    given = parser.parse_args()
    outcome = asyncio.run(e2e(given))
    outcome.print()
    judged = [bar for bar in outcome.bars if bar.bar in FUNCTIONAL or not given.functional]
    return 0 if all(bar.holds for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
