"""``python -m benchmarks.layouts``: a multimodal model whole and parted on the same cores; the last line is JSON."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.layouts import phases
from benchmarks.layouts.burst import beside_a_burst
from benchmarks.layouts.goodput import goodput
from benchmarks.layouts.mixed import mixed_goodput
from benchmarks.layouts.phases import MORE_ENCODERS, PARTED, SPREAD, WHOLE, asking
from benchmarks.layouts.prefix import first_words
from benchmarks.layouts.promised import Promises, alone
from benchmarks.layouts.same import CACHE_BYTES, same_image
from benchmarks.layouts.served import ARCHITECTURES, FORGIVING, Promise
from benchmarks.layouts.switching import switching
from benchmarks.layouts.traffic import HALF_SECONDS, calm_and_burst
from benchmarks.layouts.traffic import figures as traffic_figures
from trimtab.app import run_reporting_errors
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.result_line import Direction, ResultLine, Threshold, threshold

IMAGES = (0, 1, 2, 4, 8, 16)
FIXED = {"whole": WHOLE, "parted": PARTED, "two encoders": MORE_ENCODERS}
LEAST_OF_BEST = 0.95
LEAST_OVER_WHOLE = {4: 1.5, 1: 1.0}
"""Of chats of so many images at one rate, and of words and bursts of such chats together."""
STEADY_FACTOR, MIXED_FACTOR = 10.0, 5.0
"""Promised over what a chat takes alone: any chat as one of one image where they come at one rate, and each kind its
own where they come together. The paper does not say which it takes."""
TIMED = {"mixed", "goodput", "chosen", "burst"}
"""The phases for which it must be known what a chat takes alone."""
UNTIMED = Promises(FORGIVING, FORGIVING)
MOST_AGAIN = 48
"""An encoder holds two batches of eight at most; the text stage's sixteen places may wait for three images each."""
LEAST_BURST_RPS = 1.0
"""Also where a machine that others use carries less: such a burst is more than it can do."""
STEP_SHARE = 0.7
"""Of what two replicas of the whole model carry: the rate of the step."""
MOST_OVER_CALM = {"decoder-only": 1.2, "cross-attention": 1.1}
console = Console(stderr=True)


@dataclass(slots=True)
class Run:
    """One run: what is served and asked, what is promised, and what was found.

    Attributes:
        folder: of all that is served.
        architecture: of the model.
        images: a chat, where goodput is sought.
        promise: about any chat, where they come at one rate.
        kinds: what chats of each kind take alone.
        figures: found so far.
        bars: the same.
    """

    folder: Path
    architecture: str
    images: list[int]
    promise: Promise = FORGIVING
    kinds: Promises = UNTIMED
    figures: dict[str, float] = field(default_factory=dict)
    bars: list[Threshold] = field(default_factory=list)

    def holds(self, name: str, value: float, how: Direction, bound: float) -> None:
        """Hold a figure to a bar."""
        self.bars.append(threshold(name, value, how, bound))


async def measure(run: Run, wanted: list[str], promise: Promise | None) -> ResultLine:
    """Run the phases that are wanted; without a promise it is so many times what a chat of one image takes alone."""
    if TIMED & set(wanted):
        async with asking(run.folder / "alone", WHOLE, run.architecture, FORGIVING) as (_, asker):
            run.kinds = await alone(asker)
        run.promise = promise or run.kinds.images.times(STEADY_FACTOR)
        run.figures |= {**_told(run.kinds), "promised_over_alone": STEADY_FACTOR, "mixed_over_alone": MIXED_FACTOR}
    for name, phase in PHASES.items():
        if name in wanted:
            await phase(run)
    return ResultLine(name=f"layouts {run.architecture}", figures=run.figures, bars=tuple(run.bars))


def _told(kinds: Promises) -> dict[str, float]:
    told = {"words": kinds.words, "images": kinds.images}
    return {
        f"alone_{kind}_{name}_ms": round(1e3 * seconds, 2)
        for kind, one in told.items()
        for name, seconds in (("first_token", one.first_token_seconds), ("per_token", one.per_token_seconds))
    }


async def _mixed(run: Run) -> None:
    promises = run.kinds.times(MIXED_FACTOR)
    for name, layout in (("whole", WHOLE), ("parted", PARTED)):
        async with asking(run.folder / f"mixed {name}", layout, run.architecture, promises.images) as (_, asker):
            for images in (images for images in LEAST_OVER_WHOLE if images in run.images):
                found = await mixed_goodput(asker, promises, images)
                run.figures[f"{name}_mixed_goodput_{images}_images_rps"] = found
                console.print(f"{name}, words and bursts of {images} images a chat: {found:g} requests a second")
    for images, least in ((images, least) for images, least in LEAST_OVER_WHOLE.items() if images in run.images):
        whole, parted = (run.figures[f"{name}_mixed_goodput_{images}_images_rps"] for name in ("whole", "parted"))
        over = parted / max(whole, 1e-9)
        run.holds(f"goodput parted over whole, words and bursts of {images} images a chat", over, ">=", least)


async def _goodput(run: Run) -> None:
    for name, layout in (("whole", WHOLE), ("parted", PARTED)):
        async with asking(run.folder / name, layout, run.architecture, run.promise) as (_, asker):
            for images in run.images:
                run.figures[f"{name}_goodput_{images}_images_rps"] = found = await goodput(asker, images)
                console.print(f"{name}, {images} images a chat: {found:g} requests a second")
    for images, least in ((images, least) for images, least in LEAST_OVER_WHOLE.items() if images in run.images):
        whole, parted = (run.figures[f"{name}_goodput_{images}_images_rps"] for name in ("whole", "parted"))
        run.holds(f"goodput parted over whole, {images} images a chat", parted / max(whole, 1e-9), ">=", least)


async def _chosen(run: Run) -> None:
    """The planned layout beside the best fixed one, both asked anew: of several searches the highest is partly luck."""
    best: dict[int, tuple[float, str]] = {}
    for name, layout in FIXED.items():
        async with asking(run.folder / f"fixed {name}", layout, run.architecture, run.promise) as (_, asker):
            for images in run.images:
                found = await goodput(asker, images)
                run.figures[f"fixed {name}_goodput_{images}_images_rps"] = found
                best[images] = max(best.get(images, (0.0, name)), (found, name))
                console.print(f"{name}, {images} images a chat: {found:g} requests a second")
    again = await _best_again(run, best)
    async with asking(run.folder / "planned", None, run.architecture, run.promise) as (served, asker):
        for images, (rps, name) in best.items():
            share, runs = await phases.settled(served, asker, images, rps)
            run.figures[f"planned_share_of_best_{images}_images"] = share
            console.print(
                f"planned, {images} images a chat: {share:g} of {rps:g}; {name} again {again[images]:g}; {runs}"
            )
            over = share / again[images] if again[images] else 0.0
            run.holds(f"planned over the best fixed layout, {images} images a chat", over, ">=", LEAST_OF_BEST)


async def _best_again(run: Run, best: Mapping[int, tuple[float, str]]) -> dict[int, float]:
    """What of its goodput the best fixed layout carries when it is served once more, by images a chat."""
    again: dict[int, float] = {}
    for name in {name for _, name in best.values()}:
        async with asking(run.folder / f"again {name}", FIXED[name], run.architecture, run.promise) as (served, asker):
            for images in (images for images, (_, which) in best.items() if which == name):
                again[images], _ = await phases.settled(served, asker, images, best[images][0], settling_seconds=0.0)
                run.figures[f"best_again_{images}_images"] = again[images]
    return again


async def _switch(run: Run) -> None:
    run.figures |= await switching(run.folder / "switch", run.architecture)
    run.holds("chats lost by a change of layout", run.figures["switch_lost"], "==", 0)


async def _burst(run: Run) -> None:
    for name, layout in (("whole", WHOLE), ("parted", PARTED)):
        async with asking(run.folder / f"burst-{name}", layout, run.architecture, FORGIVING) as (_, asker):
            rps = max(0.6 * await goodput(replace(asker, promise=run.promise), 8), LEAST_BURST_RPS)
            told = await beside_a_burst(asker, rps, 8)
            run.figures |= {f"{name}_text_first_word_{key}": value for key, value in told.items()}
            run.figures[f"{name}_burst_rps"] = rps
            console.print(f"{name}: first words {told}")
    over = run.figures["parted_text_first_word_over_calm"]
    run.holds("p99 first word of text beside a burst over calm, parted", over, "<=", MOST_OVER_CALM[run.architecture])
    unanswered = run.figures["parted_text_first_word_unanswered"]
    run.holds("text chats beside a burst and in calm without an answer, parted", unanswered, "==", 0)


async def _step(run: Run) -> None:
    """At a rate whose peak is work for this machine, whatever it is: a peak that one replica carries saves nothing.

    A replica is told to have a whole core, for on a laptop nothing keeps it from taking one.
    """
    async with asking(run.folder / "step-static", WHOLE, run.architecture, phases.PATIENT) as (_, asker):
        carried = await goodput(asker, phases.BURST_IMAGES)
    opened = asking(run.folder / "step", None, run.architecture, phases.PATIENT, encoder_cores="1")
    async with opened as (served, asker):
        run.figures |= await phases.a_step(served, asker, round(STEP_SHARE * carried, 1))
    seconds, saved = run.figures["seconds_until_kept_again"], run.figures["cores_saved_fraction"]
    run.holds("seconds until promises are kept after ten times the images", seconds, "<=", 30.0)
    run.holds("core-seconds saved, of static for the peak", saved, ">=", 0.25)


async def _traffic(run: Run) -> None:
    for name, layout in (("whole", WHOLE), ("parted", PARTED)):
        place = run.folder / f"traffic-{name}"
        async with asking(place, layout, run.architecture, phases.PATIENT) as (served, _):
            results = await calm_and_burst(place / "pipeline.yaml", served.rest_port)
        told = traffic_figures(results, HALF_SECONDS)
        run.figures |= {f"{name}_traffic_{key}": value for key, value in told.items()}
        console.print(f"{name}: {told}")
        run.holds(f"chats of a cluster's traffic that failed, {name}", told["failed"], "==", 0)


async def _faults(run: Run) -> None:
    async with asking(run.folder / "faults", SPREAD, run.architecture, FORGIVING) as (served, asker):
        run.figures |= await phases.at_one_instant(asker)
        run.figures |= await phases.callers_leave(served, asker)
        run.figures |= await phases.an_encoder_dies(served, asker)
        run.figures |= await phases.a_writer_dies(served, asker)
    found = run.figures
    run.holds("image chats at one instant without answer or reason", found["silent"], "==", 0)
    run.holds("seconds until nothing is left of who hung up", found["seconds_until_nothing_is_left"], "<=", 1.0)
    run.holds("chats that failed beside those who hung up", found["failed_beside_hang_ups"], "==", 0)
    run.holds("chats lost when an encoder dies", found["encoder_killed_lost"], "==", 0)
    again = found["encoder_killed_images_encoded_again"]
    run.holds("images encoded again for one that died", again, "<=", MOST_AGAIN)
    run.holds("cut answers without a reason", found["writer_killed_without_a_reason"], "==", 0)
    run.holds("answers cut after their first words", found["writer_killed_cut_with_words"], ">=", 1)
    run.holds("seconds to that reason", found["writer_killed_slowest_reason_seconds"], "<=", 1.0)


async def _same(run: Run) -> None:
    opened = asking(run.folder / "same", SPREAD, run.architecture, FORGIVING, cache_bytes=CACHE_BYTES)
    async with opened as (served, asker):
        run.figures |= await same_image(served, asker)
    each, answered = run.figures["same_image_encodes_each"], run.figures["same_image_answered_fraction"]
    run.holds("encodings of a new image that fifty show at one instant", each, "==", 1.0)
    run.holds("of those chats that are answered", answered, "==", 1.0)


async def _prefix(run: Run) -> None:
    """Of the model that attends across there is none: it reads nothing before all images are there."""
    if run.architecture != "decoder-only":
        return
    run.figures |= await first_words(run.folder / "prefix")
    over = run.figures["ready_prefix_over_waiting"]
    run.holds("first word of eight images on the ready prefix, over waiting for all", over, "<=", 0.7)


PHASES: Final[dict[str, Callable[[Run], Awaitable[None]]]] = {
    "mixed": _mixed,
    "goodput": _goodput,
    "chosen": _chosen,
    "switch": _switch,
    "burst": _burst,
    "step": _step,
    "faults": _faults,
    "same": _same,
    "prefix": _prefix,
    "traffic": _traffic,
}


def main() -> int:
    """Measure and print the verdict."""
    parser = argparse.ArgumentParser(description="A multimodal model whole and parted, on the same cores.")
    parser.add_argument("--phase", choices=PHASES, action="append", help="only; repeatable")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    parser.add_argument("--images", type=int, choices=IMAGES, action="append", help="a chat, of goodput; repeatable")
    parser.add_argument("--first-token", type=float, help=f"seconds, of goodput: {_promised('its first word')}")
    parser.add_argument("--per-token", type=float, help=f"seconds between two pieces, of goodput: {_promised('those')}")
    return run_reporting_errors(partial(_compare, parser.parse_args()))


def _promised(what: str) -> str:
    return f"promised ({STEADY_FACTOR:g} times {what} of a chat of one image that is alone, served whole)"


def _compare(options: argparse.Namespace) -> int:
    given = (options.first_token, options.per_token)
    if given.count(None) == 1:
        raise UserError("--first-token and --per-token are one promise: give both, or none")
    with tempfile.TemporaryDirectory(prefix="trimtab-layouts-") as folder:
        run = Run(Path(folder), options.architecture, options.images or list(IMAGES))
        promise = None if None in given else Promise(*given)
        outcome = asyncio.run(measure(run, options.phase or list(PHASES), promise))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
