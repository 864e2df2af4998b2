"""Engine benchmark: 16 streams on one thread, by `generate` one request at a time, in static batches and in the engine.

A model with random weights gets prompts of 40 to 200 tokens; the trained models of pipelines/lmm-digits get chats about
pages, encoding included. Outputs have 16 to 128 tokens, so a static batch waits for its longest. The engine must
generate the tokens of `generate`; of each trained model 1,000 more chats, some cancelled, are compared. Times are
processor times of this process, or wall-clock times with `--device cuda`; each ratio is the median over the rounds.
`--published NAME` measures a model of that published size with random weights.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.engine.models import (
    PUBLISHED_VOCABULARY,
    VOCABULARY,
    ChatPrompt,
    RandomModel,
    TrainedModel,
    add_model_options,
    draw_prompts,
    placement_of,
)
from benchmarks.engine.race import STREAMS, Race
from benchmarks.harness.report import Report
from trimtab_model_servers.engine.core import EngineEvent
from trimtab_model_servers.engine.request import FinishReason, RequestDone, TokenChunk
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES

REQUESTS: Final = 10 * STREAMS
"""Of a round. Its last requests have no successor: with three batches a third of the steps would have fewer than 16
streams."""
ROUNDS: Final = 3
PROMPT_TOKENS, PUBLISHED_PROMPT_TOKENS = (40, 200), (100, 1500)
"""An image of 896 pixels has some thousand tokens, a question about it a hundred."""
PUBLISHED_SEQUENTIAL: Final = 8
"""Requests of a published model that `generate` runs one at a time, since it generates one token instead of 16."""
IDENTITY_STEP_TOKENS: Final = 23
"""Fewer than two pages' tokens, so that prompts are split inside images."""
IDENTITY_TOKENS: Final = 6
CANCELLED_SHARE: Final = 0.2


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
            if name in ARCHITECTURES:
                task = progress.add_task(f"{name}, compared with generate", total=options.compared)
                model = TrainedModel(name, options.device)
                figures = compare_with_generate(model, options.compared, partial(progress.advance, task))
                report.add({f"{name}_{key}": value for key, value in figures.items()})
                label = f"{name}: of {options.compared} chats, cancels between, those that differ"
                report.hold(label, figures["differing"], "==", 0)
    return report.finish()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks engine", description="Tokens per second of the engine.")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of a round (default {REQUESTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each race (default {ROUNDS})")
    parser.add_argument("--compared", type=int, default=1_000, help="chats compared, each trained model (default 1000)")
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
            model = RandomModel.published(name, placement_of(options))
            yield name, Race(model, prompts, options.device, PUBLISHED_SEQUENTIAL)
        return
    for name in options.only or ("random", *ARCHITECTURES):
        if name == "random":
            prompts = draw_prompts(options.requests, PROMPT_TOKENS, VOCABULARY)
            yield name, Race(RandomModel.small(options.device), prompts, options.device)
        else:
            trained = TrainedModel(name, options.device)
            yield name, Race(trained, trained.draw_batchable_chats(options.requests, seed=9), options.device)


def compare_with_generate(model: TrainedModel, count: int, advance: Callable[[], None]) -> dict[str, int]:
    """Submit chats while others run and cancel some; whole outputs, and those until a cancellation, must be equal."""
    chats = model.draw_chats(count, (IDENTITY_TOKENS, IDENTITY_TOKENS + 1), seed=17)
    outputs, ends = _run_with_cancellations(model, chats)
    usages = [done.usage for done in ends.values()]
    return {
        "compared": count,
        "differing": _count_differing(model, chats, outputs, ends, advance),
        "cancelled": sum(done.finish_reason is FinishReason.CANCELLED for done in ends.values()),
        "reused_tokens": sum(usage.cached for usage in usages),
        "prompt_tokens": sum(usage.prompt for usage in usages),
        "chunks_inside_images": sum(model.placeholders * len(chat.pages) > IDENTITY_STEP_TOKENS for chat in chats),
    }


def _run_with_cancellations(
    model: TrainedModel, chats: Sequence[ChatPrompt]
) -> tuple[list[list[int]], dict[str, RequestDone]]:
    """Return the outputs of chats, and how each ended."""
    random = np.random.default_rng(18)
    cancels = random.random(len(chats)) < CANCELLED_SHARE
    core, outputs, ends = model.core(8, IDENTITY_STEP_TOKENS), [list[int]() for _ in chats], dict[str, RequestDone]()

    def receive(event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            outputs[int(event.request_id)].append(event.token)
        else:
            ends[event.request_id] = event

    for number, chat in enumerate(chats):
        core.submit(*model.request(str(number), chat, IDENTITY_TOKENS), receive)
        for _ in range(int(random.integers(3))):
            core.step()
        if cancels[number]:
            core.cancel(str(int(random.integers(max(number - 8, 0), number + 1))))
    while core.step():
        pass
    return outputs, ends


def _count_differing(
    model: TrainedModel,
    chats: Sequence[ChatPrompt],
    outputs: Sequence[list[int]],
    ends: dict[str, RequestDone],
    advance: Callable[[], None],
) -> int:
    references: dict[object, list[int]] = {}
    differing = 0
    for number, (chat, output) in enumerate(zip(chats, outputs, strict=True)):
        if chat.key not in references:
            references[chat.key] = model.generate_to_end(chat, IDENTITY_TOKENS)
        cancelled = ends[str(number)].finish_reason is FinishReason.CANCELLED
        reference = references[chat.key]
        differing += output != (reference[: len(output)] if cancelled else reference)
        advance()
    return differing
