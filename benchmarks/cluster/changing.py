"""Delay until a plan is in force, with hand-written plans and without the adapter."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.cluster.observing import NotYetError, Watched, until
from benchmarks.cluster.setting import MANAGER, SYSTEM
from trimtab_kubernetes.objects import Object

ADAPTER = "trimtab-adapter"
PLAN_CHANGES = 40
BETWEEN_SECONDS = 0.3
LOOK_SECONDS = 0.001
PATIENCE_SECONDS = 120.0


@asynccontextmanager
async def adapter_away(watched: Watched) -> AsyncIterator[None]:
    """Stop the adapter while the block runs."""
    setting = watched.setting
    await setting.kubectl("scale", f"deployment/{ADAPTER}", "-n", SYSTEM, "--replicas=0")
    await until(lambda: _no_adapter(watched), "the adapter's end", 60)
    try:
        yield
    finally:
        await setting.kubectl("scale", f"deployment/{ADAPTER}", "-n", SYSTEM, "--replicas=1")
        await setting.rolled_out(ADAPTER, SYSTEM)


async def _no_adapter(watched: Watched) -> bool:
    listing = await watched.setting.cluster.list("Pod", SYSTEM, "app.kubernetes.io/component=adapter")
    return not listing.items


async def write_plan(watched: Watched, stage: str, **changed: Any) -> int:
    """Write the plan anew with one stage changed, as a user may; return its generation."""
    plan = await watched.plan()
    if plan is None:
        raise NotYetError(f"{watched.name} has no plan to change")
    spec = plan["spec"]
    for each in spec["stages"]:
        if each["name"] == stage:
            each.update(changed)
    spec["generation"] += 1
    spec["createdAt"] = time.time()
    body: Object = {"apiVersion": plan["apiVersion"], "kind": plan["kind"], "spec": spec}
    body["metadata"] = {"name": watched.name, "namespace": watched.setting.namespace}
    await watched.setting.cluster.apply(body, manager=MANAGER)
    return int(spec["generation"])


async def batch_changes(watched: Watched, stage: str, sizes: tuple[int, int]) -> list[float]:
    """Change a stage's batch size again and again; return the seconds from each write to its being in force."""
    taken = []
    for n in range(PLAN_CHANGES):
        generation = await write_plan(watched, stage, batchSize=sizes[n % 2])
        written = time.monotonic()
        while (await watched.state()).plan_generation != generation:
            if time.monotonic() - written > PATIENCE_SECONDS:
                raise NotYetError(f"plan {generation} was not in force within {PATIENCE_SECONDS:g} s")
            await asyncio.sleep(LOOK_SECONDS)
        taken.append(time.monotonic() - written)
        await asyncio.sleep(BETWEEN_SECONDS)
    return taken


async def variant_change(watched: Watched, stage: str, variant: str) -> float:
    """Change a stage's variant; return the seconds until a ready replica serves it."""
    await write_plan(watched, stage, variant=variant)
    written = time.monotonic()

    async def serves() -> bool:
        now = (await watched.state()).stages[stage]
        return now.variant == variant and now.ready_replicas > 0

    await until(serves, f"{variant} of {stage}", PATIENCE_SECONDS, 0.02)
    return time.monotonic() - written


async def separate(watched: Watched) -> None:
    """Give every variant a Deployment of its own, and wait until what runs does so; room is made for it first."""
    name, namespace = watched.name, watched.setting.namespace
    found = await watched.object()
    stages = len((found or {})["spec"]["stages"])
    for stage in (found or {})["spec"]["stages"]:
        await write_plan(watched, stage["name"], replicas=1)

    async def small() -> bool:
        return len(await watched.pods()) == stages

    await until(small, "one replica a stage", PATIENCE_SECONDS)
    patch = ",".join(
        f'{{"op": "add", "path": "/spec/stages/{n}/variantPlacement", "value": "Dedicated"}}' for n in range(stages)
    )
    await watched.setting.kubectl("patch", "ipl", name, "-n", namespace, "--type=json", f"-p=[{patch}]")

    async def settled() -> bool:
        generation = ((await watched.object()) or {})["metadata"]["generation"]
        applied = await watched.condition("PlanApplied")
        return applied.get("status") == "True" and applied.get("observedGeneration") == generation

    await until(settled, "one variant a Deployment", PATIENCE_SECONDS)
