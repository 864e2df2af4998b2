"""The phases: the planned layout beside the best fixed one, ten times as many images, many at one instant, deaths."""

import asyncio
import contextlib
import json
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from rich.console import Console

from benchmarks.layouts.asking import Asker, ChatResult, chats
from benchmarks.layouts.goodput import LEAST_KEPT, once_of_two, steady
from benchmarks.layouts.served import Promise, servers, serving
from tests.local_run import Up

console = Console(stderr=True)
WHOLE: Final[Mapping[str, int]] = {"answer": 2}
PARTED: Final[Mapping[str, int]] = {"encode": 1, "answer": 1}
MORE_ENCODERS: Final[Mapping[str, int]] = {"encode": 2, "answer": 1}
SPREAD: Final[Mapping[str, int]] = {"encode": 2, "answer": 2}
SHARES: Final = (1.1, 1.0, 0.95, 0.85, 0.75, 0.6, 0.45)
"""Of the best fixed layout's goodput, what is tried of the planned one, and of that one once more."""
SETTLING_SECONDS: Final = 25.0
AT_ONCE: Final = 200
HANG_UPS: Final = 2_000
LONGEST_WAIT_SECONDS: Final = 0.15
CALM_SECONDS, BURST_SECONDS = 90.0, 50.0
BURST_IMAGES: Final = 3
PATIENT: Final = Promise(0.5, 0.1)
"""What lmm-digits itself promises."""


@asynccontextmanager
async def asking(
    folder: Path,
    layout: Mapping[str, int] | None,
    architecture: str,
    promise: Promise,
    plan: Mapping[str, Any] | None = None,
    *,
    cache_bytes: int = 0,
    encoder_cores: str = "500m",
) -> AsyncIterator[tuple[Up, Asker]]:
    """Serve a layout, and ask it once so that all is warm."""
    with serving(
        folder, layout, architecture, promise, plan, cache_bytes=cache_bytes, encoder_cores=encoder_cores
    ) as served:
        model = json.loads((served.folder / "plan.json").read_text())["spec"]["pipeline"]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            asker = Asker(served.rest_port, model, session, promise)
            for images in (0, 1, 3):
                for body, _ in chats(model, images, 8, seed=5):
                    await asker.ask(body)
            yield served, asker


async def settled(
    served: Up, asker: Asker, images: int, best_rps: float, *, settling_seconds: float = SETTLING_SECONDS
) -> tuple[float, str]:
    """What of the best fixed layout's goodput is carried once such chats are known, and what then runs.

    Each share is asked for until the plan is made true, and then judged like a fixed layout. Nothing is asked for where
    no fixed layout carries anything: there is no share of that.
    """
    if not best_rps > 0:
        return 0.0, "no fixed layout keeps its promises at any rate"
    bodies = chats(asker.model, images, 64, seed=70 + images)
    for share in SHARES:
        if settling_seconds:
            await asker.at_rate(bodies, share * best_rps, settling_seconds)
        if await once_of_two(steady(asker, bodies), share * best_rps):
            return share, running(served)
    return 0.0, running(served)


def running(served: Up) -> str:
    """Which replicas the plan in force asks for."""
    stages = json.loads((served.folder / "plan.json").read_text())["spec"]["stages"]
    return ", ".join(f"{one['name']} {one['variant']} ×{one['replicas']} batch {one['batchSize']}" for one in stages)


async def a_step(served: Up, asker: Asker, rps: float) -> dict[str, float]:
    """Ten times as many images a chat, at the same rate: how soon promises are kept again, and what it costs."""
    few = [*chats(asker.model, 1, 24, seed=94), *chats(asker.model, 0, 56, seed=95)]
    np.random.default_rng(94).shuffle(few)
    many = chats(asker.model, BURST_IMAGES, 80, seed=96)
    calm = await asker.at_rate(few, rps, CALM_SECONDS)
    console.print(f"in calm: {running(served)}")
    began = time.perf_counter()
    burst = await asker.at_rate(many, rps, BURST_SECONDS)
    console.print(f"at the peak: {running(served)}")
    await asker.at_rate(few, rps, CALM_SECONDS)
    cores = [json.loads(line)["cores"] for line in (served.folder / "samples.jsonl").read_text().splitlines()]
    return {
        "step_rps": rps,
        "calm_kept_fraction": round(_kept(calm), 4),
        "burst_kept_fraction": round(_kept(burst), 4),
        "seconds_until_kept_again": _seconds_until_kept(burst, began),
        "cores_at_most": max(cores),
        "cores_saved_fraction": round(1 - statistics.fmean(cores) / max(cores), 4),
    }


def _kept(told: list[ChatResult]) -> float:
    return statistics.fmean(one.kept(PATIENT) for one in told)


def _seconds_until_kept(told: list[ChatResult], began: float) -> float:
    """From when on, of those who end in any five seconds, 99 of 100 were answered in time."""
    late = 0.0
    for start in range(int(BURST_SECONDS) - 5):
        among = [one for one in told if start <= one.ended_at - began < start + 5]
        if among and _kept(among) < LEAST_KEPT:
            late = start + 5.0
    return late


async def at_one_instant(asker: Asker) -> dict[str, float]:
    """Many chats with images at one instant: each is answered or told why not."""
    bodies = chats(asker.model, 3, AT_ONCE, seed=90)
    told = await asyncio.gather(*(asker.ask(body, answer) for body, answer in bodies))
    answered = sum(one.whole for one in told)
    refused = sum(not one.whole and bool(one.error) and one.status not in {0, 200} for one in told)
    return {"answered": answered, "refused_with_a_reason": refused, "silent": len(told) - answered - refused}


async def an_encoder_dies(served: Up, asker: Asker) -> dict[str, float]:
    """Chats come while an encoder is killed: how many are lost, and how many images are encoded twice."""
    bodies = chats(asker.model, 3, 240, seed=91, stream=False)
    before = rows_of(served, "encode")
    asked = asyncio.create_task(asker.at_rate(bodies, 30.0, 8.0))
    await asyncio.sleep(3.0)
    servers(served, "encode")[0].kill()
    told = await asked
    again = rows_of(served, "encode") - before - 3 * len(told)
    lost = [one for one in told if not one.whole]
    for one in lost:
        console.print(f"lost: {one.status} {one.error}")
    return {
        "encoder_killed_asked": len(told),
        "encoder_killed_lost": len(lost),
        "encoder_killed_images_encoded_again": again,
        "encoder_killed_right_fraction": round(statistics.fmean(one.right for one in told), 4),
    }


async def callers_leave(served: Up, asker: Asker) -> dict[str, float]:
    """Callers hang up at random points, half of them listening to a stream: when nothing of theirs is left."""
    streams, wholes = (chats(asker.model, 2, 40, seed=93, stream=stream) for stream in (True, False))
    left, random, strange = iter(range(HANG_UPS)), np.random.default_rng(93), 0

    async def caller() -> None:
        nonlocal strange
        for number in left:
            body = (streams if number % 2 else wholes)[number // 2 % 40][0] | {"max_tokens": 200, "ignore_eos": True}
            with contextlib.suppress(TimeoutError):
                heard = await asyncio.wait_for(asker.ask(body), random.uniform(0.0, LONGEST_WAIT_SECONDS))
                strange += bool(heard.error) and heard.status != 429

    await asyncio.gather(*(caller() for _ in range(16)))
    began = time.perf_counter()
    while await pending(served, asker) and time.perf_counter() - began < 5.0:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.005)
    return {
        "hang_ups": HANG_UPS,
        "failed_beside_hang_ups": strange,
        "seconds_until_nothing_is_left": round(time.perf_counter() - began, 3),
    }


async def pending(served: Up, asker: Asker) -> int:
    """What all replicas have in flight, wait for or keep."""
    found = 0
    endpoints = json.loads((served.folder / "endpoints.json").read_text())
    for replicas in endpoints["stages"].values():
        for replica in replicas:
            url = f"http://{replica['address']}/v2/models/{replica['variants'][0]}/pending"
            async with asker.session.get(url) as answer:
                told = await answer.json(content_type=None)
            found += sum(count for name, count in told.items() if name != "slots")
    return found


def rows_of(served: Up, stage: str) -> float:
    """The rows that a stage has served."""
    with urllib.request.urlopen(f"http://127.0.0.1:{served.admin_port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    named = (line for line in lines if line.startswith("trimtab_stage_rows_total{") and f'stage="{stage}"' in line)
    return float(next(named).split()[-1])


async def a_writer_dies(served: Up, asker: Asker) -> dict[str, float]:
    """Long answers are being told while their model server is killed: who heard a part is told why there is no more."""
    bodies = [body | {"max_tokens": 200, "ignore_eos": True} for body, _ in chats(asker.model, 1, 24, seed=92)]
    asked = [asyncio.create_task(asker.ask(body)) for body in bodies]
    await asyncio.sleep(0.12)
    killed_at = time.perf_counter()
    for process in servers(served, "answer"):
        process.kill()
    told = await asyncio.gather(*asked)
    return cut_streams(told, killed_at)


def cut_streams(told: list[ChatResult], killed_at: float) -> dict[str, float]:
    """What became of streams whose writer was killed then; without one that was cut after a word it says nothing."""
    cut = [one for one in told if not one.whole]
    return {
        "writer_killed_streams": len(told),
        "writer_killed_cut": len(cut),
        "writer_killed_cut_with_words": sum(one.pieces > 0 for one in cut),
        "writer_killed_without_a_reason": sum(not one.error for one in cut),
        "writer_killed_slowest_reason_seconds": round(
            max((one.ended_at - killed_at for one in cut if one.pieces), default=0.0), 3
        ),
    }
