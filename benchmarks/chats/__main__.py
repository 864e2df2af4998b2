"""Benchmark of one chat replica: disconnects, shared images, prefix of a cached image.

It serves each trained model of pipelines/lmm-digits, or published models with random weights, in its own process. The
last line is JSON.
"""

import argparse
import asyncio
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
from benchmarks.engine.models import add_model_options, placement_of
from benchmarks.harness.report import Report
from trimtab_model_servers.families.hf_vlm.parts import Placement
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.result_line import Direction

CACHE_BYTES = 4 * 2**20
PUBLISHED_LIMITS = {"slots": 16, "slot_tokens": 8192, "step_tokens": 2048, "image_tokens": 20_000, "cache_bytes": 2**30}
"""Engine limits of a published model: one image takes thousands of tokens."""
BOUNDS: tuple[tuple[str, str, Direction, float], ...] = (
    ("encodings of an image that 50 clients share", "encodings_per_image", "==", 1),
    ("encodings for another tenant", "encodings_for_another_tenant", "==", 1),
    ("first token, cached image over text", "cached_image_over_text", "<=", 1.1),
    ("seconds until nothing is allocated", "seconds_until_idle", "<=", 1),
    ("steps without requests", "steps_without_requests", "==", 0),
    ("memory growth over the disconnects", "memory_growth", "<=", 0.02),
)


async def measure(cancels: int, models: Sequence[ModelSpec], start_seconds: float) -> Report:
    report = Report("chats")
    with Progress(console=Console(stderr=True)) as progress:
        for spec in models:
            model = spec.name
            task = progress.add_task(f"{model}, disconnects", total=cancels)
            async with start_replica(spec, start_seconds) as replica:
                measured = await phases.measure_shared_images(replica, model)
                measured |= await phases.measure_cached_image(replica, model)
                measured |= await phases.measure_disconnects(replica, model, cancels, partial(progress.advance, task))
            report.add({f"{model}_{name}": value for name, value in measured.items()})
            for name, figure, direction, bound in BOUNDS:
                report.hold(f"{model}: {name}", measured[figure], direction, bound)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks chats", description=__doc__)
    parser.add_argument("--cancels", type=int, default=10_000, help="disconnected chats per model (default 10000)")
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
    return asyncio.run(measure(options.cancels, models, start_seconds)).finish()
