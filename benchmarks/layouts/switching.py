"""A change of layout under load: how long it takes, and whether a chat is lost by it."""

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.layouts.asking import Asker, ChatResult, chats
from benchmarks.layouts.phases import asking
from benchmarks.layouts.served import FOLDER, PLANNED, Promise
from trimtab_pipelines.documents import load_pipeline, write_atomically

RPS, SECONDS, CHANGES = 6.0, 10.0, 4
PATIENT: Final = Promise(3.0, 0.5)


def laid_out(*, apart: bool, generation: int) -> dict[str, Any]:
    """A plan of one layout, as whoever plans publishes it."""
    name = load_pipeline(FOLDER / f"{PLANNED}.yaml").name
    encode = {"name": "encode", "variant": "decoder-only", "batchSize": 8, "replicas": int(apart), "accuracy": 1.0}
    answer = {"name": "answer", "variant": "decoder-only" if apart else "whole", "batchSize": 8, "replicas": 1}
    stages = [encode | {"cores": 0.5}, answer | {"cores": 1.0, "accuracy": 0.967}]
    spec = {"pipeline": name, "generation": generation, "createdAt": time.time(), "stages": stages}
    return {"apiVersion": "trimtab.dev/v1alpha1", "kind": "PipelinePlan", "metadata": {"name": name}, "spec": spec}


async def switching(folder: Path, architecture: str) -> dict[str, float]:
    """Chats of two images come all the while, and the plan goes from one layout to the other and back.

    Seconds are from the plan until the router runs it.
    """
    apart, told, seconds = False, list[ChatResult](), {True: list[float](), False: list[float]()}
    plan = laid_out(apart=apart, generation=1)
    async with asking(folder, None, architecture, PATIENT, plan) as (served, asker):
        bodies = chats(asker.model, 2, 64, seed=97)
        for number in range(CHANGES):
            coming = asyncio.create_task(asker.at_rate(bodies, RPS, SECONDS))
            await asyncio.wait([coming], timeout=SECONDS / 3)
            apart = not apart
            plan = laid_out(apart=apart, generation=number + 2)
            write_atomically(served.folder / "plan.json", json.dumps(plan))
            seconds[apart].append(await _changed(asker, served.admin_port, plan["spec"]["stages"][1]["variant"]))
            told += await coming
    lost = [one for one in told if not one.whole]
    return {
        "switch_asked": len(told),
        "switch_lost": len(lost),
        "switch_right_fraction": round(statistics.fmean(one.right for one in told), 4),
        "switch_to_parted_seconds": round(max(seconds[True]), 3),
        "switch_to_whole_seconds": round(max(seconds[False]), 3),
    }


async def _changed(asker: Asker, admin_port: int, variant: str) -> float:
    """Seconds until the router runs a variant of the stage that answers."""
    began = time.perf_counter()
    async with asyncio.timeout(60):
        while True:
            async with asker.session.get(f"http://127.0.0.1:{admin_port}/trimtab/v1/state") as answer:
                if (await answer.json())["stages"]["answer"]["variant"] == variant:
                    return time.perf_counter() - began
            await asyncio.sleep(0.01)
