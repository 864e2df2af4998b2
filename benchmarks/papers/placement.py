"""ModServe's placement, served: lmm-digits with its encoder colocated or disaggregated on the same cores.

Phases: `mixed` and `goodput` compare both placements, with image chats in bursts and at one rate; `chosen` compares the
planned placement with the best fixed one; `burst` measures text-only chats beside a burst of image chats; `step` sends
ten times as many images a chat from one moment on.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.harness.grid import Rounds, confidence_interval, p99
from benchmarks.harness.processors import lower_priority, raise_priority
from benchmarks.harness.report import Report
from benchmarks.harness.serving import Holds
from benchmarks.papers.placement_chats import (
    LAX,
    MIN_IN_TIME,
    PATIENCE_SECONDS,
    ChatResult,
    ChatSender,
    ChatSlo,
    holds_once_of_two,
    in_time_share,
    measure_alone,
    mixed_load,
    search_chat_rps,
    steady_load,
)
from tests.local_run import Up, up
from trimtab.options import console
from trimtab_loadtester.chat_client import ChatClient
from trimtab_loadtester.clients import OPEN
from trimtab_pipelines.errors import UserError

FOLDER: Final = Path(__file__).parents[2] / "pipelines" / "lmm-digits"
ARCHITECTURES: Final = ("decoder-only", "cross-attention")
SLOTS, ENCODER_BATCH = 16, 8
Placement = Mapping[str, int]
"""Replicas by stage, of a core each; one stage alone is colocated."""
COLOCATED: Final = {"answer": 2}
DISAGGREGATED: Final = {"encode": 1, "answer": 1}
PLACEMENTS: Final = {"colocated": COLOCATED, "disaggregated": DISAGGREGATED}
"""By their names in figures."""
FIXED: Final = {**PLACEMENTS, "two encoders": {"encode": 2, "answer": 1}}
IMAGES: Final = (0, 1, 2, 4, 8, 16)
MIN_OVER_COLOCATED: Final = {4: 1.5, 1: 1.0}
"""Goodput disaggregated over colocated, by images a chat."""
STEADY_FACTOR, MIXED_FACTOR = 10.0, 5.0
"""SLO over what a chat takes alone: of one image for any chat at one rate, of its own kind if mixed. The paper does not
say which it uses."""
MIN_OF_BEST: Final = 0.95
SHARES: Final = (1.1, 1.0, 0.95, 0.85, 0.75, 0.6, 0.45)
"""Of the best fixed placement's goodput, tried with the planned one and again with the fixed one."""
SETTLE_SECONDS: Final = 25.0
TEXT_RPS, ROUNDS, ROUND_SECONDS = 15.0, 12, 7.0
BURST_IMAGES, MIN_BURST_RPS, BURST_SHARE = 8, 1.0, 0.6
"""Images a chat of a burst, and its rate: at least so much, also on a machine that carries less, or of the goodput."""
MIN_BEYOND_P99: Final = 10
"""Chats beyond a quantile: with fewer it is one of the largest by chance."""
NICENESS_STEP: Final = 10
MAX_OVER_CALM: Final = {"decoder-only": 1.2, "cross-attention": 1.1}
STEP_SLO: Final = ChatSlo(0.5, 0.1)
STEP_IMAGES, STEP_SHARE = 3, 0.7
"""Images a chat at the peak, and the rate over what two colocated replicas carry."""
CALM_SECONDS, PEAK_SECONDS, WINDOW_SECONDS = 90.0, 50.0, 5
MAX_RECOVERY_SECONDS, MIN_SAVED = 30.0, 0.25


@dataclass(slots=True)
class Bench:
    """One run of the benchmark."""

    folder: Path
    architecture: str
    images: Sequence[int]
    """A chat, where goodput is searched for."""
    report: Report
    slo: ChatSlo = LAX
    """Of any chat at a steady rate."""
    alone: tuple[ChatSlo, ChatSlo] = (LAX, LAX)
    """Latencies of a text-only chat and of one with an image, alone and colocated."""
    _served: int = field(default=0)

    @asynccontextmanager
    async def serve(
        self, placement: Placement | None, slo: ChatSlo, *, encoder_cores: str = "500m"
    ) -> AsyncIterator[tuple[Up, ChatSender]]:
        """Serve a placement, or let the plan choose, and send some chats to warm it up."""
        self._served += 1
        folder = self.folder / str(self._served)
        folder.mkdir()
        document = pipeline_document(self.architecture, placement, slo, encoder_cores)
        (folder / "pipeline.yaml").write_text(yaml.safe_dump(document))
        with up(folder, run_folder=folder / "run", pipeline=folder / "pipeline.yaml") as served:
            async with ChatClient(f"127.0.0.1:{served.rest_port}", document["metadata"]["name"], OPEN) as client:
                sender = ChatSender(client)
                for images in (0, 1, 3):
                    for body in sender.make_chats(images, 8, seed=5):
                        await sender.send(body)
                yield served, sender


def pipeline_document(
    architecture: str, placement: Placement | None, slo: ChatSlo, encoder_cores: str
) -> dict[str, Any]:
    """Return the pipeline of a placement; None: the plan chooses placement and replicas.

    Embeddings are not stored, since no image is shown twice.
    """
    name = "planned" if placement is None else "pipeline" if len(placement) == 1 else "disaggregated"
    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    spec = document["spec"]
    spec["slo"] = {
        "latency": "5s",
        "timeToFirstToken": f"{slo.first_token_seconds}s",
        "timePerOutputToken": f"{slo.per_token_seconds}s",
    }
    spec["budget"] = {"cores": "2", "surgeCores": "1"} if placement is None else {"cores": "4"}
    for stage in spec["stages"]:
        generates = stage["role"] == "Generate"
        if placement is None:
            stage["batchSizes"] = [1, 2, 4, 8, *([SLOTS] if generates else [])]
            if not generates:
                stage["variants"][0]["resources"]["cpu"] = encoder_cores
        else:
            size = SLOTS if generates else ENCODER_BATCH
            stage["variants"] = [
                next((v for v in stage["variants"] if v["name"] == architecture), stage["variants"][0])
            ]
            stage["variants"][0]["resources"]["cpu"] = "1"
            stage["batchSizes"] = [size]
            stage["pin"] = {"replicas": placement[stage["name"]], "batchSize": size}
        for variant in stage["variants"]:
            _set_weights(variant, architecture, generates=generates)
    return document


def _set_weights(variant: dict[str, Any], architecture: str, *, generates: bool) -> None:
    variant["storageUri"] = str((FOLDER / "weights" / f"{architecture}.safetensors").resolve())
    variant["parameters"] = {"slots": SLOTS, "cache_bytes": 0}
    if variant["name"] in ARCHITECTURES:
        variant["name"] = architecture
    if generates:
        variant["maxBatchSize"] = SLOTS


async def measure_slos(bench: Bench) -> None:
    """Measure what chats take alone, colocated, and derive the SLO of steady rates."""
    async with bench.serve(COLOCATED, LAX) as (_, sender):
        text, image = await measure_alone(sender, 0), await measure_alone(sender, 1)
    bench.alone = (text, image)
    for kind, latencies in (("text", text), ("image", image)):
        bench.report.add(
            {
                f"alone_{kind}_first_token_ms": round(1e3 * latencies.first_token_seconds, 2),
                f"alone_{kind}_per_token_ms": round(1e3 * latencies.per_token_seconds, 2),
            }
        )
    bench.report.add({"slo_over_alone": STEADY_FACTOR, "mixed_slo_over_alone": MIXED_FACTOR})


async def compare_mixed(bench: Bench) -> None:
    slos = [latencies.times(MIXED_FACTOR) for latencies in bench.alone]
    images = [count for count in MIN_OVER_COLOCATED if count in bench.images]
    goodputs = {
        name: await _search_goodputs(bench, placement, name, slos[1], images, partial(mixed_load, slos=slos))
        for name, placement in PLACEMENTS.items()
    }
    _hold_over_colocated(bench, goodputs, "mixed_goodput", "text and bursts of {} images a chat")


async def compare_goodput(bench: Bench) -> None:
    goodputs = {name: await _search_steady(bench, placement, name) for name, placement in PLACEMENTS.items()}
    _hold_over_colocated(bench, goodputs, "goodput", "{} images a chat")


def _hold_over_colocated(bench: Bench, goodputs: Mapping[str, Mapping[int, float]], figure: str, label: str) -> None:
    for name, by_images in goodputs.items():
        bench.report.add({f"{name}_{figure}_{images}_images_rps": rps for images, rps in by_images.items()})
    colocated, disaggregated = goodputs.values()
    for images, bound in MIN_OVER_COLOCATED.items():
        if images in colocated:
            ratio = disaggregated[images] / max(colocated[images], 1e-9)
            bench.report.hold(f"goodput disaggregated over colocated, {label.format(images)}", ratio, ">=", bound)


async def _search_steady(bench: Bench, placement: Placement, name: str) -> dict[int, float]:
    return await _search_goodputs(bench, placement, name, bench.slo, bench.images, partial(steady_load, slo=bench.slo))


async def _search_goodputs(
    bench: Bench, placement: Placement, name: str, slo: ChatSlo, images: Iterable[int], load: Callable[..., Holds]
) -> dict[int, float]:
    """Return the goodput by images a chat; `load` returns the trial of a rate."""
    goodputs = {}
    async with bench.serve(placement, slo) as (_, sender):
        for count in images:
            goodputs[count] = await search_chat_rps(load(sender, images=count))
            console.print(f"{name}, {count} images a chat: {goodputs[count]:g} chats a second")
    return goodputs


async def compare_planned(bench: Bench) -> None:
    """Compare the planned placement with the best fixed one, both measured again: a maximum is partly luck."""
    best: dict[int, tuple[float, str]] = {}
    for name, placement in FIXED.items():
        for images, rps in (await _search_steady(bench, placement, name)).items():
            bench.report.add({f"fixed {name}_goodput_{images}_images_rps": rps})
            best[images] = max(best.get(images, (0.0, name)), (rps, name))
    again: dict[int, float] = {}
    for name in {name for _, name in best.values()}:
        async with bench.serve(FIXED[name], bench.slo) as (_, sender):
            for images in (images for images, (_, which) in best.items() if which == name):
                again[images] = await carried_share(sender, bench.slo, images, best[images][0])
                bench.report.add({f"best_again_{images}_images": again[images]})
    async with bench.serve(None, bench.slo) as (served, sender):
        for images, (rps, name) in best.items():
            share = await carried_share(sender, bench.slo, images, rps, settle_seconds=SETTLE_SECONDS)
            bench.report.add({f"planned_share_of_best_{images}_images": share})
            ratio = share / again[images] if again[images] else 0.0
            console.print(
                f"planned, {images} images: {share:g} of {rps:g} ({name} again {again[images]:g}); {plan(served)}"
            )
            bench.report.hold(
                f"planned over the best fixed placement, {images} images a chat", ratio, ">=", MIN_OF_BEST
            )


async def carried_share(
    sender: ChatSender, slo: ChatSlo, images: int, best_rps: float, *, settle_seconds: float = 0.0
) -> float:
    """Return the share of a fixed placement's goodput that is carried; 0 if no fixed placement carries anything.

    Before each share is tried, its load lasts for `settle_seconds`, so that a plan can follow it.
    """
    if not best_rps > 0:
        return 0.0
    chats = sender.make_chats(images, 64, seed=70 + images)
    for share in SHARES:
        if settle_seconds:
            await sender.send_at_rate(chats, share * best_rps, settle_seconds)
        if await holds_once_of_two(steady_load(sender, slo, images), share * best_rps):
            return share
    return 0.0


def plan(served: Up) -> str:
    """Describe the plan in force."""
    stages = json.loads((served.folder / "plan.json").read_text())["spec"]["stages"]
    return ", ".join(f"{s['name']} {s['variant']} ×{s['replicas']} batch {s['batchSize']}" for s in stages)


async def compare_burst(bench: Bench) -> None:
    """Measure the time to the first token of text-only chats beside a burst of image chats."""
    for name, placement in PLACEMENTS.items():
        async with bench.serve(placement, LAX) as (_, sender):
            goodput = await search_chat_rps(steady_load(sender, bench.slo, BURST_IMAGES))
            rps = max(BURST_SHARE * goodput, MIN_BURST_RPS)
            figures = await beside_a_burst(sender, rps)
        bench.report.add({f"{name}_text_first_token_{key}": value for key, value in figures.items()})
        bench.report.add({f"{name}_burst_rps": rps})
        console.print(f"{name}: time to first token {figures}")
    ratio, unanswered = (figures[key] for key in ("over_calm", "unanswered"))  # the disaggregated one, served last
    bound = MAX_OVER_CALM[bench.architecture]
    bench.report.hold("p99 first token of text beside a burst over calm, disaggregated", ratio, "<=", bound)
    bench.report.hold("text chats beside a burst and in calm without a response, disaggregated", unanswered, "==", 0)


async def beside_a_burst(sender: ChatSender, burst_rps: float) -> dict[str, float]:
    """Send text-only chats alone and beside image chats, in interleaved short rounds with the same chats.

    Image chats are sent by a process of its own, which takes no core from others; the process that measures waits for
    none, if that is allowed: in production clients have machines of their own.
    """
    text = sender.make_chats(0, 64, seed=80)
    calm: list[list[ChatResult]] = []
    burst: list[list[ChatResult]] = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        loop = asyncio.get_running_loop()

        def send_images(rps: float, seconds: float, seed: int) -> asyncio.Future[None]:
            return loop.run_in_executor(
                pool, _send_image_chats, sender.client.address, sender.client.model, rps, seconds, seed
            )

        await send_images(1.0, 1.0, 0)  # all is loaded by then
        with raise_priority(NICENESS_STEP):
            for number in range(ROUNDS):
                for is_burst in (False, True) if number % 2 == 0 else (True, False):
                    sent = sender.send_at_rate(text, TEXT_RPS, ROUND_SECONDS, seed=number)
                    if is_burst:
                        results, _ = await asyncio.gather(sent, send_images(burst_rps, ROUND_SECONDS, number))
                        burst.append(results)
                    else:
                        calm.append(await sent)
    unanswered = sum(not result.complete for results in (*calm, *burst) for result in results)
    return compare_rounds([*map(first_seconds, calm)], [*map(first_seconds, burst)]) | {"unanswered": unanswered}


def _send_image_chats(address: str, model: str, rps: float, seconds: float, seed: int) -> None:
    lower_priority(NICENESS_STEP)

    async def send() -> None:
        async with ChatClient(address, model, OPEN) as client:
            sender = ChatSender(client)
            await sender.send_at_rate(sender.make_chats(BURST_IMAGES, 64, seed=81), rps, seconds, seed=seed)

    asyncio.run(send())


def first_seconds(results: Sequence[ChatResult]) -> NDArray[np.float64]:
    """Return the seconds to the first token; an incomplete chat counts as the longest wait.

    It does not count as the SLO: if rejections were the tail of a calm time too, a burst would look no worse.
    """
    return np.array([result.first_seconds if result.complete else PATIENCE_SECONDS for result in results])


def compare_rounds(calm: Rounds, burst: Rounds) -> dict[str, float]:
    """Return P99 beside a burst over that in calm, of all rounds together, with its 90 % interval.

    Chats of one round share what the machine did meanwhile, so rounds are resampled, not chats.

    Raises ValueError if there are too few chats for such a quantile, or the numbers of rounds differ.
    """
    if len(calm) != len(burst):
        raise ValueError(f"each round is of both; got {len(calm)} in calm and {len(burst)} beside a burst")
    fewest = min(sum(len(seconds) for seconds in rounds) for rounds in (calm, burst))
    if 0.01 * fewest < MIN_BEYOND_P99:
        needed = math.ceil(MIN_BEYOND_P99 / 0.01)
        raise ValueError(f"a 99th percentile needs at least {needed} chats; got {fewest}; send more or longer rounds")
    low, high = confidence_interval(lambda which: p99(burst, which) / p99(calm, which), len(calm))
    every = np.arange(len(calm))
    return {
        "calm_ms": round(1e3 * p99(calm, every), 2),
        "burst_ms": round(1e3 * p99(burst, every), 2),
        "over_calm": round(p99(burst, every) / p99(calm, every), 3),
        "over_calm_low": round(low, 3),
        "over_calm_high": round(high, 3),
        "median_over_calm": round(float(np.median(np.concatenate(burst)) / np.median(np.concatenate(calm))), 3),
        "chats_each": fewest,
    }


async def measure_step(bench: Bench) -> None:
    """Send ten times as many images a chat at the same rate, whose peak needs more than one replica.

    An encoder is given a whole core, since on a laptop nothing keeps it from taking one.
    """
    async with bench.serve(COLOCATED, STEP_SLO) as (_, sender):
        carried = await search_chat_rps(steady_load(sender, STEP_SLO, STEP_IMAGES))
    rps = round(STEP_SHARE * carried, 1)
    async with bench.serve(None, STEP_SLO, encoder_cores="1") as (served, sender):
        few = [*sender.make_chats(1, 24, seed=94), *sender.make_chats(0, 56, seed=95)]
        np.random.default_rng(94).shuffle(few)
        many = sender.make_chats(STEP_IMAGES, 80, seed=96)
        calm = await sender.send_at_rate(few, rps, CALM_SECONDS)
        console.print(f"in calm: {plan(served)}")
        began = time.perf_counter()
        peak = await sender.send_at_rate(many, rps, PEAK_SECONDS)
        console.print(f"at the peak: {plan(served)}")
        await sender.send_at_rate(few, rps, CALM_SECONDS)
        samples = (served.folder / "samples.jsonl").read_text().splitlines()
    cores = [json.loads(sample)["cores"] for sample in samples]
    recovery_seconds, saved = seconds_until_in_time(peak, began), 1 - statistics.fmean(cores) / max(cores)
    bench.report.add(
        {
            "step_rps": rps,
            "calm_in_time_fraction": round(in_time_share(calm, STEP_SLO), 4),
            "peak_in_time_fraction": round(in_time_share(peak, STEP_SLO), 4),
            "recovery_seconds": recovery_seconds,
            "cores_at_most": max(cores),
            "cores_saved_fraction": round(saved, 4),
        }
    )
    bench.report.hold(
        "seconds until SLOs are met after ten times the images", recovery_seconds, "<=", MAX_RECOVERY_SECONDS
    )
    bench.report.hold("core-seconds saved, of static for the peak", saved, ">=", MIN_SAVED)


def seconds_until_in_time(results: Sequence[ChatResult], began: float) -> float:
    """Return from when on 99 of 100 chats that end in any five seconds are in time."""
    late = 0.0
    for start in range(int(PEAK_SECONDS) - WINDOW_SECONDS):
        window = [result for result in results if start <= result.ended_at - began < start + WINDOW_SECONDS]
        if in_time_share(window, STEP_SLO) < MIN_IN_TIME:
            late = float(start + WINDOW_SECONDS)
    return late


PHASES: Final[Mapping[str, Callable[[Bench], Awaitable[None]]]] = {
    "mixed": compare_mixed,
    "goodput": compare_goodput,
    "chosen": compare_planned,
    "burst": compare_burst,
    "step": measure_step,
}


def main() -> int:
    """Run the phases; 0 if every threshold holds."""
    parser = argparse.ArgumentParser(prog="benchmarks placement", description=__doc__)
    parser.add_argument("--phase", choices=PHASES, action="append", help="only this one; repeatable")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    parser.add_argument("--images", type=int, choices=IMAGES, action="append", help="a chat, of goodput; repeatable")
    of_alone = f"default: {STEADY_FACTOR:g} times that of a chat with one image, alone and colocated"
    parser.add_argument("--first-token", type=float, help=f"seconds, SLO of goodput; {of_alone}")
    parser.add_argument("--per-token", type=float, help=f"seconds, SLO of goodput; {of_alone}")
    options = parser.parse_args()
    slo = (options.first_token, options.per_token)
    if slo.count(None) == 1:
        raise UserError("--first-token and --per-token are one SLO: give both, or none")
    with tempfile.TemporaryDirectory(prefix="trimtab-placement-") as folder:
        report = Report(f"placement {options.architecture}")
        bench = Bench(Path(folder), options.architecture, options.images or IMAGES, report)
        asyncio.run(_run_phases(bench, options.phase or list(PHASES), None if None in slo else ChatSlo(*slo)))
    return report.finish()


async def _run_phases(bench: Bench, phases: Sequence[str], slo: ChatSlo | None) -> None:
    if phases != ["step"]:
        await measure_slos(bench)
        bench.slo = slo or bench.alone[1].times(STEADY_FACTOR)
    for name, phase in PHASES.items():
        if name in phases:
            await phase(bench)
