"""Terminal view of a run: a table updated in place or, in a log, plain lines."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trimtab.local.counters import CHAT_LABELS
from trimtab.options import terminal_table
from trimtab.plan_view import accuracy_provenance
from trimtab.run import LocalRun
from trimtab.run_samples import Run, SampleWindow, StageSample, stage_summaries
from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.plan import PipelinePlan, StagePlan

PLAIN_EVERY_SAMPLES = 10


def run_in_terminal(local_run: LocalRun, console: Console) -> Run:
    with terminal_view(local_run, console):
        return asyncio.run(local_run.run())


@contextmanager
def terminal_view(local_run: LocalRun, console: Console) -> Iterator[None]:
    window = SampleWindow()
    local_run.on_ready = lambda run: console.print(ready_line(run))
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as screen:
            local_run.on_sample = lambda run: screen.update(_screen(run, window), refresh=True)
            yield
    else:
        local_run.on_sample = lambda run: _print_lines(run, window, console)
        yield


def ready_line(local_run: LocalRun) -> str:
    supervisor = local_run.supervisor
    name, seconds = supervisor.pipeline.name, local_run.ready_seconds
    rest = f"http://127.0.0.1:{supervisor.rest_port}/v2/models/{name}/infer"
    grpc = f"gRPC 127.0.0.1:{supervisor.grpc_port}" if supervisor.setup.proxy else "no Envoy: REST for trusted clients"
    metrics = f"metrics http://127.0.0.1:{supervisor.admin_port}/metrics"
    page = f"\nlive page: {local_run.page.url}" if local_run.page is not None else ""
    error = f"\n! no live page: {local_run.page_error}" if local_run.page_error else ""
    return f"{name} is ready after {seconds:.1f} s: {rest}, {grpc}, {metrics}{page}{error}"


def _screen(local_run: LocalRun, window: SampleWindow) -> Group:
    window.add(local_run.recent_samples[-1])
    plan = local_run.supervisor.plan
    lines = [Text(_load_line(local_run, window), style="bold"), Text(_outcome_line(local_run))]
    if plan is not None:
        lines.append(Text(_plan_line(plan), style="dim"))
    lines += [Text(f"! {fault.what}", style="red") for fault in local_run.supervisor.faults[-3:]]
    return Group(*lines, _stages_table(local_run, plan))


def _stages_table(local_run: LocalRun, plan: PipelinePlan | None) -> Table:
    rows = []
    planned = {stage.name: stage for stage in plan.spec.stages} if plan else {}
    for name, stage in local_run.recent_samples[-1].stages.items():
        stage_plan, accuracy = planned.get(name), ""
        if stage_plan is not None:
            provenance = accuracy_provenance(local_run.supervisor.pipeline, stage_plan)
            accuracy = f"{stage_plan.accuracy:.3f} {provenance}"
        rows.append((*_row(name, stage, stage_plan), accuracy))
    return terminal_table(("stage", "variant", "batch size", "replicas", "queued rows", "accuracy"), rows)


def _row(name: str, stage: StageSample, plan: StagePlan | None) -> tuple[str, ...]:
    if plan is None:
        return name, stage.variant, str(stage.batch_size), str(stage.ready_replicas), str(stage.queue_rows)
    variant = stage.variant if stage.variant == plan.variant else f"{stage.variant} → {plan.variant}"
    replicas = f"{stage.ready_replicas}/{plan.all_replicas}"
    return name, variant, str(stage.batch_size), replicas, str(stage.queue_rows)


def _load_line(local_run: LocalRun, window: SampleWindow) -> str:
    plan, progress, spec = local_run.supervisor.plan, local_run.progress, local_run.supervisor.pipeline.spec
    forecast = plan.spec.forecast if plan else None
    parts = [f"load {window.rps:.1f} requests/s"]
    if forecast is not None:
        parts.append(f"planned for {forecast.peak_rps:.1f} ({forecast.source})")
    p50, p99 = window.latency_seconds(0.5), window.latency_seconds(0.99)
    if p50 is not None and p99 is not None:
        slo_ms = 1000 * spec.slo.latency_seconds
        parts.append(f"p50 ≤ {1000 * p50:.0f} ms, p99 ≤ {1000 * p99:.0f} ms, SLO {slo_ms:.0f} ms")
    parts += _token_latencies(local_run, window)
    parts.append(f"cores {local_run.recent_samples[-1].cores:g}/{spec.budget.cores:g}")
    if progress is not None:
        parts.append(
            f"{min(progress.elapsed_seconds, progress.duration_seconds):.0f}/{progress.duration_seconds:.0f} s"
        )
    return " · ".join(parts)


def _token_latencies(local_run: LocalRun, window: SampleWindow) -> Iterator[str]:
    slo = local_run.supervisor.pipeline.spec.slo
    for modality, label in CHAT_LABELS.items():
        for metric, seconds, target in (
            ("time to first token", window.first_token_seconds(modality, 0.99), slo.time_to_first_token_seconds),
            ("between tokens", window.next_token_seconds(modality, 0.99), slo.time_per_output_token_seconds),
        ):
            if seconds is not None:
                slo_text = "" if target is None else f", SLO {1000 * target:g} ms"
                yield f"{label}: {metric} p99 ≤ {1000 * seconds:g} ms{slo_text}"


def _outcome_line(local_run: LocalRun) -> str:
    counters, progress = local_run.recent_samples[-1].counters, local_run.progress
    parts = [f"received {counters.received}", *(f"{name} {count}" for name, count in counters.outcomes.items())]
    if counters.accuracy_count:
        sources = accuracy_sources(local_run.supervisor.pipeline.spec.stages)
        parts.append(f"expected accuracy {counters.accuracy_sum / counters.accuracy_count:.4f} ({sources})")
    if progress is not None and progress.total:
        parts.append(f"measured accuracy {progress.correct / progress.total:.4f}")
    return " · ".join(parts)


def _plan_line(plan: PipelinePlan) -> str:
    reason = "" if plan.spec.feasible else f" [{plan.spec.reason}]"
    return f"plan {plan.spec.generation}{reason}: {plan.spec.explanation.change or 'given'}"


def _print_lines(local_run: LocalRun, window: SampleWindow, console: Console) -> None:
    samples, supervisor = local_run.recent_samples, local_run.supervisor
    window.add(samples[-1])
    previous_at = samples[0].at if local_run.sample_count > 1 else 0.0
    for fault in supervisor.faults:
        if previous_at < fault.at <= samples[-1].at:
            console.print(f"! {fault.what}")
    if local_run.sample_count % PLAIN_EVERY_SAMPLES != 1:
        return
    summaries = stage_summaries(supervisor.plan) if supervisor.plan else {}
    stages = ", ".join(f"{stage}: {summary}" for stage, summary in summaries.items()) or "no plan yet"
    console.print(f"{_load_line(local_run, window)} · {stages}", soft_wrap=True, highlight=False)
