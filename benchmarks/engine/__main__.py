"""Engine benchmark: 16 streams on one thread, by `generate` one request at a time, in static batches and in the engine.

A model with random weights gets prompts of 40 to 200 tokens; the trained models of pipelines/lmm-digits get chats about
pages, encoding included. Outputs have 16 to 128 tokens, so a static batch waits for its longest. The engine must
generate the tokens of `generate`. Times are processor times of this process, or wall-clock times with `--device cuda`;
each ratio is the median over the rounds.
`--published NAME` measures a model of that published size with random weights.
"""

import argparse
from collections.abc import Iterator
from typing import Final

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.engine.models import (
    PUBLISHED_VOCABULARY,
    VOCABULARY,
    RandomModel,
    TrainedModel,
    add_model_options,
    draw_prompts,
)
from benchmarks.engine.race import STREAMS, Race
from benchmarks.harness.report import Report
from trimtab_model_servers.families.hf_chat.parts import Placement
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES

REQUESTS: Final = 10 * STREAMS
"""Of a round. Its last requests have no successor: with three batches a third of the steps would have fewer than 16
streams."""
ROUNDS: Final = 3
PROMPT_TOKENS, PUBLISHED_PROMPT_TOKENS = (40, 200), (100, 1500)
"""An image of 896 pixels has some thousand tokens, a question about it a hundred."""
PUBLISHED_SEQUENTIAL: Final = 8
"""Requests of a published model that `generate` runs one at a time, since it generates one token instead of 16."""


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    report = Report("engine", {"streams": STREAMS, "requests": options.requests})
    with Progress(console=Console(stderr=True)) as progress:
        for name, race in _races(options):
            race.run(progress, name, options.rounds)
            race.judge(report, name)
            if options.dtype == "float32":
                report.hold(f"{name}: long answers that differ from generate's", race.differing, "==", 0)
    return report.finish()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks engine", description="Tokens per second of the engine.")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of a round (default {REQUESTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each race (default {ROUNDS})")
    parser.add_argument("--only", choices=(*ARCHITECTURES, "random"), action="append", help="repeatable")
    add_model_options(parser)
    options = parser.parse_args()
    if options.dtype != "float32" and not options.published:
        parser.error("--dtype requires --published")
    return options


def _races(options: argparse.Namespace) -> Iterator[tuple[str, Race]]:
    if options.published:
        prompts = draw_prompts(options.requests, PUBLISHED_PROMPT_TOKENS, PUBLISHED_VOCABULARY)
        for name in options.published:
            model = RandomModel.published(name, Placement(options.dtype, options.device))
            yield name, Race(model, prompts, options.device, PUBLISHED_SEQUENTIAL)
        return
    for name in options.only or ("random", *ARCHITECTURES):
        if name == "random":
            prompts = draw_prompts(options.requests, PROMPT_TOKENS, VOCABULARY)
            yield name, Race(RandomModel.small(options.device), prompts, options.device)
        else:
            trained = TrainedModel(name, options.device)
            yield name, Race(trained, trained.draw_batchable_chats(options.requests, seed=9), options.device)
