"""What a run looks like in the terminal while it goes on: a table that stays in place, or plain lines in a log."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trimtab.chat_stats import KINDS
from trimtab.plan_view import accuracy_provenance
from trimtab.run import LocalRun
from trimtab.run_samples import SampleWindow, StageSample, stage_summaries
from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.plan import PipelinePlan, StagePlan

PLAIN_EVERY_SAMPLES = 10


@contextmanager
def terminal_view(session: LocalRun, console: Console) -> Iterator[None]:
    """Show the session while the block runs."""
    window = SampleWindow()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as screen:
            session.on_ready = lambda s: console.print(ready_line(s))
            session.on_sample = lambda s: screen.update(_page(s, window), refresh=True)
            yield
    else:
        session.on_ready = lambda s: console.print(ready_line(s))
        session.on_sample = lambda s: _tell(s, window, console)
        yield


def ready_line(session: LocalRun) -> str:
    """Say where the pipeline is served."""
    local = session.supervisor
    name, seconds = local.pipeline.name, session.ready_seconds
    rest = f"http://127.0.0.1:{local.rest_port}/v2/models/{name}/infer"
    grpc = (
        f"gRPC 127.0.0.1:{local.grpc_port}"
        if local.setup.proxy
        else "no Envoy in front: REST only, for trusted callers"
    )
    metrics = f"metrics http://127.0.0.1:{local.admin_port}/metrics"
    page = f"\nlive page: {session.page.url}" if session.page is not None else ""
    trouble = f"\n! no live page: {session.page_error}" if session.page_error else ""
    return f"{name} is ready after {seconds:.1f} s: {rest}, {grpc}, {metrics}{page}{trouble}"


def _page(session: LocalRun, window: SampleWindow) -> Group:
    window.add(session.recent_samples[-1])
    plan = session.supervisor.plan
    lines = [Text(_load_line(session, window), style="bold"), Text(_outcome_line(session))]
    if plan is not None:
        lines.append(Text(_plan_line(plan), style="dim"))
    lines += [Text(f"! {fault.what}", style="red") for fault in session.supervisor.faults[-3:]]
    return Group(*lines, _stages(session, plan))


def _stages(session: LocalRun, plan: PipelinePlan | None) -> Table:
    table = Table("stage", "variant", "batch", "replicas", "queue", "accuracy", box=None, pad_edge=False)
    planned = {stage.name: stage for stage in plan.spec.stages} if plan else {}
    for name, stage in session.recent_samples[-1].stages.items():
        wanted = planned.get(name)
        accuracy = (
            ""
            if wanted is None
            else f"{wanted.accuracy:.3f} {accuracy_provenance(session.supervisor.pipeline, wanted)}"
        )
        table.add_row(*_row(name, stage, wanted), accuracy)
    return table


def _row(name: str, stage: StageSample, plan: StagePlan | None) -> tuple[str, ...]:
    if plan is None:
        return name, stage.variant, str(stage.batch_size), str(stage.ready_replicas), str(stage.queue_rows)
    variant = stage.variant if stage.variant == plan.variant else f"{stage.variant} → {plan.variant}"
    replicas = f"{stage.ready_replicas}/{plan.replicas}"
    return name, variant, str(stage.batch_size), replicas, str(stage.queue_rows)


def _load_line(session: LocalRun, window: SampleWindow) -> str:
    plan, progress = session.supervisor.plan, session.progress
    forecast = plan.spec.forecast if plan else None
    parts = [f"load {window.rps:.1f} requests/s"]
    if forecast is not None:
        parts.append(f"planned for {forecast.peak_rps:.1f} ({forecast.source})")
    p50, p99 = window.latency_seconds(0.5), window.latency_seconds(0.99)
    if p50 is not None and p99 is not None:
        slo = session.supervisor.pipeline.spec.slo.latency_seconds
        parts.append(f"p50 ≤ {1000 * p50:.0f} ms, p99 ≤ {1000 * p99:.0f} ms of {1000 * slo:.0f}")
    parts += _first_words(session, window)
    parts.append(f"cores {session.recent_samples[-1].cores:g}/{session.supervisor.pipeline.spec.budget.cores:g}")
    if progress is not None:
        parts.append(
            f"{min(progress.elapsed_seconds, progress.duration_seconds):.0f}/{progress.duration_seconds:.0f} s"
        )
    return " · ".join(parts)


def _first_words(session: LocalRun, window: SampleWindow) -> Iterator[str]:
    """Say of chats with images and without when their answers begin, and how fast they go on."""
    slo = session.supervisor.pipeline.spec.slo
    for modality, kind in KINDS.items():
        for what, seconds, most in (
            ("first token", window.first_seconds(modality, 0.99), slo.time_to_first_token_seconds),
            ("between tokens", window.next_seconds(modality, 0.99), slo.time_per_output_token_seconds),
        ):
            if seconds is not None:
                of = "" if most is None else f" of {1000 * most:g}"
                yield f"{kind}: {what} p99 ≤ {1000 * seconds:g} ms{of}"


def _outcome_line(session: LocalRun) -> str:
    counters = session.recent_samples[-1].counters
    parts = [f"received {counters.received}", *(f"{name} {count}" for name, count in counters.outcomes.items())]
    if counters.accuracy_count:
        expected = counters.accuracy_sum / counters.accuracy_count
        known = accuracy_sources(session.supervisor.pipeline.spec.stages)
        parts.append(f"expected accuracy of the answers {expected:.4f} (by {known} ones)")
    if session.progress is not None and session.progress.total:
        parts.append(f"measured {session.progress.correct / session.progress.total:.4f}")
    return " · ".join(parts)


def _plan_line(plan: PipelinePlan) -> str:
    reason = "" if plan.spec.feasible else f" [{plan.spec.reason}]"
    return f"plan {plan.spec.generation}{reason}: {plan.spec.explanation.change or 'as given'}"


def _tell(session: LocalRun, window: SampleWindow, console: Console) -> None:
    window.add(session.recent_samples[-1])
    since = session.recent_samples[0].at if session.sample_count > 1 else 0.0
    for fault in session.supervisor.faults:
        if since < fault.at <= session.recent_samples[-1].at:
            console.print(f"! {fault.what}")
    if session.sample_count % PLAIN_EVERY_SAMPLES != 1:
        return
    plan = session.supervisor.plan
    running = ", ".join(f"{stage}: {line}" for stage, line in stage_summaries(plan).items()) if plan else "no plan yet"
    console.print(f"{_load_line(session, window)} · {running}", soft_wrap=True, highlight=False)
