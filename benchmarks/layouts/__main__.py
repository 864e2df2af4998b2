"""``python -m benchmarks.layouts``: a multimodal model whole and parted on the same cores; the last line is JSON."""

import argparse
import asyncio
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.layouts import phases
from benchmarks.layouts.burst import beside_a_burst
from benchmarks.layouts.phases import MORE_ENCODERS, PARTED, SPREAD, WHOLE, asking
from benchmarks.layouts.prefix import first_words
from benchmarks.layouts.same import CACHE_BYTES, same_image
from benchmarks.layouts.served import ARCHITECTURES, QUICK, Promise
from benchmarks.layouts.switching import switching
from benchmarks.layouts.traffic import HALF_SECONDS, calm_and_burst
from benchmarks.layouts.traffic import figures as traffic_figures
from trimtab.commands import reporting_errors
from trimtab_pipelines.verdict import Bar, Outcome, bar

PHASES = ("goodput", "chosen", "switch", "burst", "step", "faults", "same", "prefix", "traffic")
IMAGES = (0, 1, 2, 4, 8, 16)
FIXED = {"whole": WHOLE, "parted": PARTED, "two encoders": MORE_ENCODERS}
LEAST_OF_BEST = 0.95
LEAST_OVER_WHOLE = {4: 1.5, 1: 1.0}
FORGIVING = Promise(3.0, 0.5)
"""Promised of the first word where things die or lateness is what is measured: nobody is dropped for it."""
MOST_AGAIN = 48
"""An encoder holds two batches of eight at most; the text stage's sixteen places may wait for three images each."""
LEAST_BURST_RPS = 1.0
"""Also where a machine that others use carries less: such a burst is more than it can do."""
STEP_SHARE = 0.7
"""Of what two replicas of the whole model carry: the rate of the step."""
MOST_OVER_CALM = {"decoder-only": 1.2, "cross-attention": 1.1}
console = Console(stderr=True)


async def measure(
    folder: Path, architecture: str, wanted: list[str], images: list[int], promise: Promise = QUICK
) -> Outcome:
    """Run the phases that are wanted, goodput under a promise with so many images a chat."""
    figures: dict[str, float] = {}
    bars: list[Bar] = []
    if "goodput" in wanted:
        await _goodput(folder, architecture, images, promise, figures, bars)
    if "chosen" in wanted:
        await _chosen(folder, architecture, images, figures, bars)
    if "switch" in wanted:
        figures |= await switching(folder / "switch", architecture)
        bars.append(bar("chats lost by a change of layout", figures["switch_lost"], "==", 0))
    if "burst" in wanted:
        await _burst(folder, architecture, figures, bars)
    if "step" in wanted:
        await _step(folder, architecture, figures, bars)
    if "faults" in wanted:
        await _faults(folder, architecture, figures, bars)
    if "same" in wanted:
        opened = asking(folder / "same", SPREAD, architecture, FORGIVING, cache_bytes=CACHE_BYTES)
        async with opened as (served, asker):
            figures |= await same_image(served, asker)
        each, answered = figures["same_image_encodes_each"], figures["same_image_answered_fraction"]
        bars.append(bar("encodings of a new image that fifty show at one instant", each, "==", 1.0))
        bars.append(bar("of those chats that are answered", answered, "==", 1.0))
    if "prefix" in wanted and architecture == "decoder-only":  # the other reads nothing before all images are there
        figures |= await first_words(folder / "prefix")
        over = figures["ready_prefix_over_waiting"]
        bars.append(bar("first word of eight images on the ready prefix, over waiting for all", over, "<=", 0.7))
    if "traffic" in wanted:
        await _traffic(folder, architecture, figures, bars)
    return Outcome(name=f"layouts {architecture}", figures=figures, bars=tuple(bars))


async def _goodput(
    folder: Path,
    architecture: str,
    wanted: list[int],
    promise: Promise,
    figures: dict[str, float],
    bars: list[Bar],
) -> None:
    for name, layout in (("whole", WHOLE), ("parted", PARTED)):
        async with asking(folder / name, layout, architecture, promise) as (_, asker):
            for images in wanted:
                figures[f"{name}_goodput_{images}_images_rps"] = found = await phases.goodput(asker, images)
                console.print(f"{name}, {images} images a chat: {found:g} requests a second")
    for images, least in ((images, least) for images, least in LEAST_OVER_WHOLE.items() if images in wanted):
        whole, parted = (figures[f"{name}_goodput_{images}_images_rps"] for name in ("whole", "parted"))
        bars.append(bar(f"goodput parted over whole, {images} images a chat", parted / max(whole, 1e-9), ">=", least))


async def _chosen(
    folder: Path, architecture: str, wanted: list[int], figures: dict[str, float], bars: list[Bar]
) -> None:
    """The planned layout beside every fixed one, which is asked just before it and stands where it is known."""
    best: dict[int, float] = {}
    for name, layout in FIXED.items():
        async with asking(folder / f"fixed {name}", layout, architecture) as (_, asker):
            for images in wanted:
                found = await phases.goodput(asker, images)
                figures[f"fixed {name}_goodput_{images}_images_rps"] = found
                best[images] = max(best.get(images, 0.0), found)
                console.print(f"{name}, {images} images a chat: {found:g} requests a second")
    async with asking(folder / "planned", None, architecture) as (served, asker):
        for images in wanted:
            share, runs = await phases.settled(served, asker, images, best[images])
            figures[f"planned_share_of_best_{images}_images"] = share
            console.print(f"planned, {images} images a chat: {share:g} of {best[images]:g}; {runs}")
            bars.append(bar(f"planned over the best fixed layout, {images} images a chat", share, ">=", LEAST_OF_BEST))


async def _burst(folder: Path, architecture: str, figures: dict[str, float], bars: list[Bar]) -> None:
    for name, layout in (("whole", WHOLE), ("parted", PARTED)):
        async with asking(folder / f"burst-{name}", layout, architecture, FORGIVING) as (_, asker):
            rps = max(0.6 * await phases.goodput(replace(asker, promise=QUICK), 8), LEAST_BURST_RPS)
            told = await beside_a_burst(asker, rps, 8)
            figures |= {f"{name}_text_first_word_{key}": value for key, value in told.items()}
            figures[f"{name}_burst_rps"] = rps
            console.print(f"{name}: first words {told}")
    over = figures["parted_text_first_word_over_calm"]
    bars.append(
        bar("p99 first word of text beside a burst over calm, parted", over, "<=", MOST_OVER_CALM[architecture])
    )
    unanswered = figures["parted_text_first_word_unanswered"]
    bars.append(bar("text chats beside a burst and in calm without an answer, parted", unanswered, "==", 0))


async def _step(folder: Path, architecture: str, figures: dict[str, float], bars: list[Bar]) -> None:
    """At a rate whose peak is work for this machine, whatever it is: a peak that one replica carries saves nothing.

    A replica is told to have a whole core, for on a laptop nothing keeps it from taking one.
    """
    async with asking(folder / "step-static", WHOLE, architecture, phases.PATIENT) as (_, asker):
        carried = await phases.goodput(asker, phases.BURST_IMAGES)
    opened = asking(folder / "step", None, architecture, phases.PATIENT, encoder_cores="1")
    async with opened as (served, asker):
        figures |= await phases.a_step(served, asker, round(STEP_SHARE * carried, 1))
    seconds, saved = figures["seconds_until_kept_again"], figures["cores_saved_fraction"]
    bars.append(bar("seconds until promises are kept after ten times the images", seconds, "<=", 30.0))
    bars.append(bar("core-seconds saved, of static for the peak", saved, ">=", 0.25))


async def _traffic(folder: Path, architecture: str, figures: dict[str, float], bars: list[Bar]) -> None:
    for name, layout in (("whole", WHOLE), ("parted", PARTED)):
        place = folder / f"traffic-{name}"
        async with asking(place, layout, architecture, phases.PATIENT) as (served, _):
            results = await calm_and_burst(place / "pipeline.yaml", served.rest_port)
        told = traffic_figures(results, HALF_SECONDS)
        figures |= {f"{name}_traffic_{key}": value for key, value in told.items()}
        console.print(f"{name}: {told}")
        bars.append(bar(f"chats of a cluster's traffic that failed, {name}", told["failed"], "==", 0))


async def _faults(folder: Path, architecture: str, figures: dict[str, float], bars: list[Bar]) -> None:
    async with asking(folder / "faults", SPREAD, architecture, FORGIVING) as (served, asker):
        figures |= await phases.at_one_instant(asker)
        figures |= await phases.callers_leave(served, asker)
        figures |= await phases.an_encoder_dies(served, asker)
        figures |= await phases.a_writer_dies(served, asker)
    bars += [
        bar("image chats at one instant without answer or reason", figures["silent"], "==", 0),
        bar("seconds until nothing is left of who hung up", figures["seconds_until_nothing_is_left"], "<=", 1.0),
        bar("chats that failed beside those who hung up", figures["failed_beside_hang_ups"], "==", 0),
        bar("chats lost when an encoder dies", figures["encoder_killed_lost"], "==", 0),
        bar("images encoded again for one that died", figures["encoder_killed_images_encoded_again"], "<=", MOST_AGAIN),
        bar("cut answers without a reason", figures["writer_killed_without_a_reason"], "==", 0),
        bar("answers cut after their first words", figures["writer_killed_cut_with_words"], ">=", 1),
        bar("seconds to that reason", figures["writer_killed_slowest_reason_seconds"], "<=", 1.0),
    ]


def main() -> int:
    """Measure and print the verdict."""
    parser = argparse.ArgumentParser(description="A multimodal model whole and parted, on the same cores.")
    parser.add_argument("--phase", choices=PHASES, action="append", help="only; repeatable")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    parser.add_argument("--images", type=int, choices=IMAGES, action="append", help="a chat, of goodput; repeatable")
    parser.add_argument(
        "--first-token", type=float, default=QUICK.first_token_seconds, help="seconds, of goodput: what is promised"
    )
    parser.add_argument(
        "--per-token", type=float, default=QUICK.per_token_seconds, help="seconds between two pieces, of goodput"
    )
    return reporting_errors(partial(_compare, parser.parse_args()))


def _compare(options: argparse.Namespace) -> int:
    promise = Promise(options.first_token, options.per_token)
    with tempfile.TemporaryDirectory(prefix="trimtab-layouts-") as folder:
        wanted = options.phase or list(PHASES)
        images = options.images or list(IMAGES)
        outcome = asyncio.run(measure(Path(folder), options.architecture, wanted, images, promise))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
