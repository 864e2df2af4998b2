"""`trimtab status`: what a running router serves now."""

import asyncio
from typing import Annotated, Any

import typer
from rich.table import Table

from trimtab.local.router_client import Counters, RouterClient
from trimtab.options import console


def command(port: Annotated[int, typer.Option(help="The router's REST port")] = 8080) -> int:
    """Show what a router on this machine runs now, and what became of its requests."""
    state, counters = asyncio.run(_ask(port))
    table = Table("stage", "variant", "batch", "point", "replicas", "queue", "service ratio", box=None, pad_edge=False)
    for name, stage in state["stages"].items():
        ratio = stage.get("service_ratio")
        table.add_row(
            name,
            str(stage["variant"]),
            str(stage["batch_size"]),
            str(stage["operating_point"]),
            str(stage["ready_replicas"]),
            str(stage["queue_rows"]),
            "–" if ratio is None else f"{ratio:.2f}",
        )
    ready = "ready" if state.get("ready") else "not ready"
    console.print(f"plan {state['plan_generation']}, {ready}")
    console.print(table)
    counts = " · ".join(f"{outcome} {count}" for outcome, count in counters.outcomes.items())
    console.print(f"received {counters.received} · {counts}")
    return 0


async def _ask(port: int) -> tuple[dict[str, Any], Counters]:
    client = RouterClient(port)
    try:
        return await client.state(), await client.counters()
    finally:
        await client.close()
