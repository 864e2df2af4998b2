"""`trimtab status`: what a running router serves now, or how the pipelines of a cluster are."""

import asyncio
import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from trimtab.chat_stats import KINDS, ChatStats, chat_stats
from trimtab.local.router_client import Counters, RouterClient
from trimtab.options import JsonOption, console, parse_address, write_json_line
from trimtab_pipelines.router_state import RecentRequests, RouterState
from trimtab_pipelines.status import condition_of


def command(
    port: Annotated[int, typer.Option(min=1, max=65535, help="The router's administrative port")] = 8082,
    address: Annotated[str | None, typer.Option(help="host:port of a router elsewhere; instead of --port")] = None,
    *,
    as_json: JsonOption = False,
    cluster: Annotated[bool, typer.Option("--cluster", help="Show the pipelines of the cluster instead")] = False,
    namespace: Annotated[str | None, typer.Option(help="With --cluster: only those of this namespace")] = None,
) -> int:
    """Show what a router runs now, and what became of its requests; exits with 1 where it is not ready."""
    if cluster:
        found = asyncio.run(_listed(namespace))
        if as_json:
            write_json_line(found)
        else:
            console.print(_pipelines(found))
        return 0
    state, counters = asyncio.run(_ask(*(("127.0.0.1", port) if address is None else parse_address(address))))
    if as_json:
        told: dict[str, Any] = {"received": counters.received, **counters.outcomes}
        told |= {"client_errors": counters.client_errors}
        chats = {name: asdict(chat_stats(counters, name)) for name in counters.first_token_buckets}
        told |= {"chats": {name: _told(figures) for name, figures in chats.items()}} if chats else {}
        write_json_line(
            {"pipeline": counters.pipeline, **state.model_dump(), "since_start": told, "drops": counters.drops}
        )
    else:
        _show(state, counters)
    return 0 if state.ready else 1


def _show(state: RouterState, counters: Counters) -> None:
    applied = state.plan_applied_at
    since = "" if applied is None else f" since {datetime.fromtimestamp(applied, UTC):%Y-%m-%d %H:%M:%S} UTC"
    ready = "ready" if state.ready else "not ready"
    console.print(f"{counters.pipeline or 'pipeline'}: {ready}, plan {state.plan_generation}{since}")
    console.print(_stages(state))
    for name, stage in state.stages.items():
        for replica, seen in stage.endpoints.items():
            if seen.rejection:
                console.print(f"stage {name}: {replica} gets no work: {seen.rejection}")
    if state.served is not None:
        console.print(f"last minute: {_minute(state.served)}{_known_by(state.accuracy_sources)}")
    counts = " · ".join(f"{outcome} {count}" for outcome, count in counters.outcomes.items())
    theirs = f" · of these by callers' own doing {counters.client_errors}" if counters.client_errors else ""
    console.print(f"received {counters.received} · {counts}{theirs}")
    if share := _in_time(counters):
        console.print(share)
    for modality in counters.first_token_buckets:
        console.print(_chats(KINDS[modality], chat_stats(counters, modality)))
    for why, count in sorted(counters.drops.items()):
        console.print(f"dropped in {why}: {count}")


def _in_time(counters: Counters) -> str:
    """Which share of those that ended was answered as promised; empty where none was that could have been."""
    due = sum(counters.outcomes.values()) - counters.client_errors
    return f"answered in time {100 * counters.outcomes.get('ok', 0) / due:.2f} %" if due > 0 else ""


def _chats(kind: str, seen: ChatStats) -> str:
    first = f"first token p50 ≤ {_ms(seen.first_p50_seconds)}, p99 ≤ {_ms(seen.first_p99_seconds)}"
    following = f"between tokens p50 ≤ {_ms(seen.next_p50_seconds)}, p99 ≤ {_ms(seen.next_p99_seconds)}"
    return f"{kind}: {seen.answered} answered, {first}; {following}"


def _told(figures: dict[str, Any]) -> dict[str, Any]:
    """What a router knows and JSON can say: what lies beyond the last bucket's edge, and times of nothing, are null."""
    known = {name: value for name, value in figures.items() if name != "in_time_fraction"}
    return {name: value if math.isfinite(value) else None for name, value in known.items()}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:g} ms" if math.isfinite(seconds) else "–"


def _minute(served: RecentRequests) -> str:
    p99 = "–" if served.p99_seconds is None else f"{1000 * served.p99_seconds:.0f} ms"
    accuracy = "–" if served.accuracy is None else f"{served.accuracy:.4f}"
    return f"{served.received} received, {served.answered} answered, p99 {p99}, expected accuracy {accuracy}"


def _known_by(accuracy_sources: str) -> str:
    return f", by {accuracy_sources} ones" if accuracy_sources else ""


def _stages(state: RouterState) -> Table:
    table = Table("stage", "variant", "batch", "point", "replicas", "queue", "service ratio", box=None, pad_edge=False)
    for name, stage in state.stages.items():
        table.add_row(
            name,
            stage.variant,
            str(stage.batch_size),
            stage.operating_point,
            str(stage.ready_replicas),
            str(stage.queue_rows),
            "–" if stage.service_ratio is None else f"{stage.service_ratio:.2f}",
        )
    return table


def _pipelines(found: list[dict[str, Any]]) -> Table:
    columns = ("namespace", "pipeline", "ready", "reason", "rps", "forecast", "accuracy", "p99", "cores", "plan")
    table = Table(*columns, box=None, pad_edge=False)
    for one in sorted(found, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"])):
        status, ready = one.get("status") or {}, condition_of(one, "Ready")
        rps, forecast, p99, cores = (status.get(name, "–") for name in ("rps", "forecastRps", "p99", "cores"))
        accuracy = f"{status['accuracy']} ({_sources(one)})" if "accuracy" in status else "–"
        latest: dict[str, Any] = next(iter(status.get("history") or ()), {})
        plan = "; ".join(f"{stage}: {line}" for stage, line in latest.get("stages", {}).items())
        named = (one["metadata"]["namespace"], one["metadata"]["name"])
        condition = (ready.get("status", "Unknown"), ready.get("reason", "–"))
        table.add_row(*named, *condition, rps, forecast, accuracy, p99, cores, plan or "–")
    return table


def _sources(pipeline: dict[str, Any]) -> str:
    from trimtab_pipelines.accuracy import accuracy_sources  # noqa: PLC0415  (these take long, and a router needs none of them)
    from trimtab_pipelines.spec import InferencePipeline  # noqa: PLC0415

    try:
        return accuracy_sources(InferencePipeline.model_validate(pipeline).spec.stages)
    except ValueError:  # of another version than this command
        return "of a source unknown here"


async def _listed(namespace: str | None) -> list[dict[str, Any]]:
    from trimtab.kubernetes_access import all_pipelines, connected  # noqa: PLC0415  (not needed to ask a router)

    async with connected() as cluster:
        return await all_pipelines(cluster, namespace)


async def _ask(host: str, port: int) -> tuple[RouterState, Counters]:
    client = RouterClient(port, host)
    try:
        return await client.state(), await client.counters()
    finally:
        await client.close()
