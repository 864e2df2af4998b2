"""``python -m benchmarks.chats``: what a replica that answers chats holds to, measured on one; the last line is JSON.

Both trained models of pipelines/lmm-digits, each whole in a replica of its own process; or published ones with
random weights, on a GPU where they are asked to be.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.progress import Progress

from benchmarks.chats import phases
from benchmarks.chats.replica import DRAWING_SECONDS, START_SECONDS, published, started, whole
from benchmarks.published import add_published, kept_of
from trimtab.app import run_reporting_errors
from trimtab_model_servers.families.hf_vlm.parts import Placement
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

CACHE_BYTES = 4 * 2**20
ROOM = {"slots": 16, "slot_tokens": 8192, "step_tokens": 2048, "image_tokens": 20_000, "cache_bytes": 2**30}
"""Of a published model: its images are thousands of tokens."""


async def measure(cancels: int, chats: int, models: Sequence[ModelSpec], within_seconds: float) -> ResultLine:
    """Run every phase on every model."""
    figures: dict[str, float] = dict(await phases.pulls())
    bars = [threshold("embeddings pulled, GB/s on loopback", figures["pulled_gigabytes_per_second"], ">=", 0.5)]
    with Progress(console=Console(stderr=True)) as progress:
        for spec in models:
            model = spec.name
            task = progress.add_task(f"{model}, cancels", total=cancels)
            async with started(spec, within_seconds=within_seconds) as replica:
                told = await phases.side_by_side(replica, model, chats)
                told |= await phases.same_image(replica, model)
                told |= await phases.seen_before(replica, model)
                told |= await phases.cancels(replica, model, cancels, partial(progress.advance, task))
            figures |= {f"{model}_{name}": value for name, value in told.items()}
            bars += _bars(model, told)
    return ResultLine(name="chats", figures=figures, bars=tuple(bars))


def _bars(model: str, told: dict[str, float]) -> list[Threshold]:
    return [
        threshold(f"{model}: answers otherwise than alone", told["answered_otherwise_than_alone"], "==", 0),
        threshold(f"{model}: encodes of an image that many show at once", told["encodes_per_image"], "==", 1),
        threshold(f"{model}: encodes of it for another tenant", told["encodes_for_another_tenant"], "==", 1),
        threshold(f"{model}: first word, image seen before over text alone", told["hit_over_text"], "<=", 1.1),
        threshold(f"{model}: seconds until nothing is held", told["seconds_until_all_gauges_are_zero"], "<=", 1),
        threshold(f"{model}: steps for nobody", told["steps_after_that"], "==", 0),
        threshold(f"{model}: memory growth over the cancels", told["memory_growth"], "<=", 0.02),
    ]


def main() -> int:
    """Measure and print the verdict."""
    parser = argparse.ArgumentParser(description="What a replica that answers chats holds to.")
    parser.add_argument("--cancels", type=int, default=10_000, help="chats hung up on, each model (default 10000)")
    parser.add_argument("--chats", type=int, default=500, help="chats answered side by side (default 500)")
    parser.add_argument("--only", choices=ARCHITECTURES, action="append", help="this model; repeatable")
    add_published(parser)
    options = parser.parse_args()
    if not options.published and kept_of(options) != Placement():
        parser.error("--device and --dtype are of a published model; name one by --published")
    if options.published:
        models = [published(name, kept_of(options), **ROOM) for name in options.published]
    else:
        models = [whole(name, cache_bytes=CACHE_BYTES) for name in options.only or ARCHITECTURES]
    within_seconds = DRAWING_SECONDS if options.published else START_SECONDS
    outcome = asyncio.run(measure(options.cancels, options.chats, models, within_seconds))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
