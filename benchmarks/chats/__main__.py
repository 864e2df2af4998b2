"""Benchmark of one chat replica: disconnects, shared images, prefix of a cached image, embedding transfer.

It serves each trained model of pipelines/lmm-digits, or published models with random weights, in its own process. The
last line is JSON.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.progress import Progress

from benchmarks.chats import phases
from benchmarks.chats.replica import (
    RANDOM_WEIGHTS_START_SECONDS,
    START_SECONDS,
    published_model,
    start_replica,
    trained_model,
)
from benchmarks.published import add_model_options, placement_of
from trimtab.app import run_reporting_errors
from trimtab_model_servers.families.hf_vlm.parts import Placement
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

CACHE_BYTES = 4 * 2**20
PUBLISHED_LIMITS = {"slots": 16, "slot_tokens": 8192, "step_tokens": 2048, "image_tokens": 20_000, "cache_bytes": 2**30}
"""Engine limits of a published model: one image takes thousands of tokens."""


async def measure(cancels: int, chats: int, models: Sequence[ModelSpec], start_seconds: float) -> ResultLine:
    figures: dict[str, float] = dict(await phases.measure_embedding_transfer())
    bars = [threshold("embedding transfer, GB/s on loopback", figures["transfer_gigabytes_per_second"], ">=", 0.5)]
    with Progress(console=Console(stderr=True)) as progress:
        for spec in models:
            model = spec.name
            task = progress.add_task(f"{model}, disconnects", total=cancels)
            async with start_replica(spec, start_seconds) as replica:
                measured = await phases.measure_concurrent_chats(replica, model, chats)
                measured |= await phases.measure_shared_images(replica, model)
                measured |= await phases.measure_cached_image(replica, model)
                measured |= await phases.measure_disconnects(replica, model, cancels, partial(progress.advance, task))
            figures |= {f"{model}_{name}": value for name, value in measured.items()}
            bars += _bars(model, measured)
    return ResultLine(name="chats", figures=figures, bars=tuple(bars))


def _bars(model: str, measured: dict[str, float]) -> list[Threshold]:
    return [
        threshold(f"{model}: outputs that differ from those alone", measured["differing_outputs"], "==", 0),
        threshold(f"{model}: encodings of an image that 50 clients share", measured["encodings_per_image"], "==", 1),
        threshold(f"{model}: encodings for another tenant", measured["encodings_for_another_tenant"], "==", 1),
        threshold(f"{model}: first token, cached image over text", measured["cached_image_over_text"], "<=", 1.1),
        threshold(f"{model}: seconds until nothing is allocated", measured["seconds_until_idle"], "<=", 1),
        threshold(f"{model}: steps without requests", measured["steps_without_requests"], "==", 0),
        threshold(f"{model}: memory growth over the disconnects", measured["memory_growth"], "<=", 0.02),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Disconnects and shared images of a chat replica.")
    parser.add_argument("--cancels", type=int, default=10_000, help="disconnected chats per model (default 10000)")
    parser.add_argument("--chats", type=int, default=500, help="concurrent chats (default 500)")
    parser.add_argument("--only", choices=ARCHITECTURES, action="append", help="measure this model; repeatable")
    add_model_options(parser)
    options = parser.parse_args()
    if not options.published and placement_of(options) != Placement():
        parser.error("--device and --dtype require --published")
    if options.published:
        models = [published_model(name, placement_of(options), **PUBLISHED_LIMITS) for name in options.published]
    else:
        models = [trained_model(name, cache_bytes=CACHE_BYTES) for name in options.only or ARCHITECTURES]
    start_seconds = RANDOM_WEIGHTS_START_SECONDS if options.published else START_SECONDS
    outcome = asyncio.run(measure(options.cancels, options.chats, models, start_seconds))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
