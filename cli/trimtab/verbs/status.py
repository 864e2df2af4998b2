"""`trimtab status`: what a running router serves now, or how the pipelines of a cluster are."""

import asyncio
from typing import Annotated, Any

import typer
from rich.table import Table

from trimtab.in_cluster import all_pipelines, connected
from trimtab.local.router_client import Counters, RouterClient
from trimtab.options import console
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.status import condition_of


def command(
    port: Annotated[int, typer.Option(help="The router's administrative port")] = 8082,
    *,
    cluster: Annotated[bool, typer.Option("--cluster", help="Show the pipelines of the cluster instead")] = False,
    namespace: Annotated[str | None, typer.Option(help="With --cluster: only those of this namespace")] = None,
) -> int:
    """Show what a router on this machine runs now, and what became of its requests."""
    if cluster:
        console.print(_pipelines(asyncio.run(_listed(namespace))))
        return 0
    state, counters = asyncio.run(_ask(port))
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
    console.print(f"plan {state.plan_generation}, {'ready' if state.ready else 'not ready'}")
    console.print(table)
    for name, stage in state.stages.items():
        for replica, seen in stage.endpoints.items():
            if seen.refused:
                console.print(f"stage {name}: {replica} gets no work: {seen.refused}")
    counts = " · ".join(f"{outcome} {count}" for outcome, count in counters.outcomes.items())
    console.print(f"received {counters.received} · {counts}")
    return 0


def _pipelines(found: list[dict[str, Any]]) -> Table:
    columns = ("namespace", "pipeline", "ready", "reason", "rps", "forecast", "accuracy", "p99", "cores", "plan")
    table = Table(*columns, box=None, pad_edge=False)
    for one in sorted(found, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"])):
        status, ready = one.get("status") or {}, condition_of(one, "Ready")
        amounts = (status.get(name, "–") for name in ("rps", "forecastRps", "accuracy", "p99", "cores"))
        latest: dict[str, Any] = next(iter(status.get("history") or ()), {})
        plan = "; ".join(f"{stage}: {line}" for stage, line in latest.get("stages", {}).items())
        named = (one["metadata"]["namespace"], one["metadata"]["name"])
        table.add_row(*named, ready.get("status", "Unknown"), ready.get("reason", "–"), *amounts, plan or "–")
    return table


async def _listed(namespace: str | None) -> list[dict[str, Any]]:
    async with connected() as cluster:
        return await all_pipelines(cluster, namespace)


async def _ask(port: int) -> tuple[RouterState, Counters]:
    client = RouterClient(port)
    try:
        return await client.state(), await client.counters()
    finally:
        await client.close()
