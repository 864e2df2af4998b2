"""`trimtab status`: state of a running router, or of the pipelines of a cluster."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from trimtab.local.counters import CHAT_LABELS, ChatStats, Counters, chat_stats
from trimtab.local.router_client import RouterClient
from trimtab.options import JsonOption, console, parse_address, print_json_line, terminal_table
from trimtab_pipelines.router_state import RecentRequests, RouterState, reported_rows
from trimtab_pipelines.row_shares import describe_shares, escalation_rate, have_several_points
from trimtab_pipelines.status import condition_of


def command(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Admin port of a local router")] = 8082,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of a remote router's admin port")] = None,
    *,
    as_json: JsonOption = False,
    cluster: Annotated[bool, typer.Option("--cluster", help="Show the pipelines of the cluster")] = False,
    namespace: Annotated[str | None, typer.Option(help="With --cluster: only this namespace")] = None,
) -> int:
    """Show what a router serves and the outcomes of its requests; exit with 1 if it is not ready."""
    if cluster:
        documents = asyncio.run(_list_pipelines(namespace))
        if as_json:
            print_json_line(documents)
        else:
            console.print(pipelines_table(documents))
        return 0
    state, counters = asyncio.run(_fetch(*(("127.0.0.1", port) if address is None else parse_address(address))))
    if as_json:
        since_start: dict[str, Any] = {"received": counters.received, **counters.outcomes}
        since_start |= {"client_errors": counters.client_errors}
        chats = {name: asdict(chat_stats(counters, name)) for name in counters.first_token_buckets}
        since_start |= {"chats": {name: _chat_json(stats) for name, stats in chats.items()}} if chats else {}
        print_json_line(
            {"pipeline": counters.pipeline, **state.model_dump(), "since_start": since_start, "drops": counters.drops}
        )
    else:
        print_status(state, counters)
    return 0 if state.ready else 1


def print_status(state: RouterState, counters: Counters) -> None:
    applied = state.plan_applied_at
    since = "" if applied is None else f" since {datetime.fromtimestamp(applied, UTC):%Y-%m-%d %H:%M:%S} UTC"
    ready = "ready" if state.ready else "not ready"
    console.print(f"{counters.pipeline or 'pipeline'}: {ready}, plan {state.plan_generation}{since}")
    console.print(_stages_table(state))
    for line in _share_lines(state):
        console.print(line)
    for name, stage in state.stages.items():
        for replica, endpoint in stage.endpoints.items():
            if endpoint.rejection:
                console.print(f"stage {name}: replica {replica} rejected: {endpoint.rejection}")
    if state.served is not None:
        accuracy_source = f" ({state.accuracy_sources})" if state.accuracy_sources else ""
        console.print(f"last minute: {_recent_line(state.served)}{accuracy_source}")
    counts = " · ".join(f"{outcome} {count}" for outcome, count in counters.outcomes.items())
    client_errors = f" · of which client errors {counters.client_errors}" if counters.client_errors else ""
    console.print(f"received {counters.received} · {counts}{client_errors}")
    finished = sum(counters.outcomes.values()) - counters.client_errors
    if finished > 0:
        console.print(f"within the SLO {100 * counters.outcomes.get('ok', 0) / finished:.2f} %")
    for modality in counters.first_token_buckets:
        console.print(_chat_line(CHAT_LABELS[modality], chat_stats(counters, modality)))
    for reason, count in sorted(counters.drops.items()):
        console.print(f"dropped in {reason}: {count}")


def _share_lines(state: RouterState) -> Iterator[str]:
    """Describe the rows of stages that several points answer, or should answer."""
    for name, stage in state.stages.items():
        expected, recent = reported_rows(stage.expected_shares), reported_rows(stage.recent_rows)
        if have_several_points(expected, recent):
            measured = (
                f"last minute {describe_shares(recent) or 'no rows'}, escalation rate {escalation_rate(recent):.1%}"
            )
            yield f"{name}: {measured}; expected {describe_shares(expected)}"


def _chat_line(label: str, stats: ChatStats) -> str:
    first = (
        f"time to first token p50 ≤ {_ms(stats.first_token_p50_seconds)}, p99 ≤ {_ms(stats.first_token_p99_seconds)}"
    )
    following = f"between tokens p50 ≤ {_ms(stats.next_token_p50_seconds)}, p99 ≤ {_ms(stats.next_token_p99_seconds)}"
    return f"{label}: {stats.answered} answered, {first}; {following}"


def _chat_json(stats: dict[str, Any]) -> dict[str, Any]:
    """Return a router's statistics as JSON values: NaN and infinity become null."""
    values = {name: value for name, value in stats.items() if name != "in_time_fraction"}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:g} ms" if math.isfinite(seconds) else "–"


def _recent_line(recent: RecentRequests) -> str:
    p99 = "–" if recent.p99_seconds is None else f"{1000 * recent.p99_seconds:.0f} ms"
    accuracy = "–" if recent.accuracy is None else f"{recent.accuracy:.4f}"
    return f"{recent.received} received, {recent.answered} answered, p99 {p99}, expected accuracy {accuracy}"


def _stages_table(state: RouterState) -> Table:
    columns = ("stage", "variant", "batch size", "operating point", "replicas", "queued rows", "service ratio")
    rows = []
    for name, stage in state.stages.items():
        ratio = "–" if stage.service_ratio is None else f"{stage.service_ratio:.2f}"
        counts = (str(stage.ready_replicas), str(stage.queue_rows), ratio)
        rows.append((name, stage.variant, str(stage.batch_size), stage.operating_point, *counts))
    return terminal_table(columns, rows)


def pipelines_table(documents: list[dict[str, Any]]) -> Table:
    columns = ("namespace", "pipeline", "ready", "reason", "rps", "forecast", "accuracy", "p99", "cores", "plan")
    rows = []
    for document in sorted(documents, key=lambda d: (d["metadata"]["namespace"], d["metadata"]["name"])):
        status, ready = document.get("status") or {}, condition_of(document, "Ready")
        rps, forecast, p99, cores = (status.get(name, "–") for name in ("rps", "forecastRps", "p99", "cores"))
        accuracy = f"{status['accuracy']} ({_accuracy_sources(document)})" if "accuracy" in status else "–"
        latest: dict[str, Any] = next(iter(status.get("history") or ()), {})
        plan = "; ".join(f"{stage}: {summary}" for stage, summary in latest.get("stages", {}).items())
        name = (document["metadata"]["namespace"], document["metadata"]["name"])
        condition = (ready.get("status", "Unknown"), ready.get("reason", "–"))
        rows.append((*name, *condition, rps, forecast, accuracy, p99, cores, plan or "–"))
    return terminal_table(columns, rows)


def _accuracy_sources(document: dict[str, Any]) -> str:
    from trimtab_pipelines.accuracy import accuracy_sources  # noqa: PLC0415  (slow to import, and not needed for a router)
    from trimtab_pipelines.spec import InferencePipeline  # noqa: PLC0415

    try:
        return accuracy_sources(InferencePipeline.model_validate(document).spec.stages)
    except ValueError:  # the document is of another version than this command
        return "unknown source"


async def _list_pipelines(namespace: str | None) -> list[dict[str, Any]]:
    from trimtab.kubernetes_access import PIPELINE, connected  # noqa: PLC0415  (not needed for a router)

    async with connected() as cluster:
        return (await cluster.list(PIPELINE, namespace)).items


async def _fetch(host: str, port: int) -> tuple[RouterState, Counters]:
    client = RouterClient(port, host)
    try:
        return await client.state(), await client.counters()
    finally:
        await client.close()
