"""``python -m benchmarks.engine``: 16 streams on one thread, three ways in turn, the same requests.

The last line is JSON. First a model with random weights, prompts of 40 to 200 tokens; then the trained ones of
pipelines/lmm-digits, chats about pages. Answers have 16 to 128 tokens: a static batch waits for its longest,
as such batches do. The engine must write the tokens that `generate` writes alone; answers that differ are counted, and
of each trained model 1,000 chats more, as they end by themselves. Times are this process's processor time, or with
`--device cuda` the clock's, and each ratio is the median of the rounds'. `--published NAME` races a model of that
published size, weights random.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.engine import text, trained
from benchmarks.engine.race import STREAMS, Race, Way
from benchmarks.published import add_model_options, placement_of
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES, Architecture
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

REQUESTS = 10 * STREAMS
"""A round. Its last answers have nobody behind them: of three batches' worth that is a third of the steps, which are
then not of sixteen streams."""
ROUNDS = 3


def main() -> int:
    """Measure in turns, print a table's worth of lines and the verdict."""
    options = _options()
    torch.set_num_threads(1)
    figures: dict[str, float] = {"streams": STREAMS, "requests": options.requests}
    bars: list[Threshold] = []
    with Progress(console=Console(stderr=True)) as progress:
        for name, race in _races(options):
            told = race.race(progress, name, options.rounds)
            figures |= {f"{name}_{key}": value for key, value in told.items()}
            bars += race.bars(name)
            if options.dtype == "float32":
                bars.append(threshold(f"{name}: long answers that differ from generate's", race.differing, "==", 0))
            if name in ARCHITECTURES:
                told, bars_of_it = _identity(name, options, progress)
                figures |= told
                bars += bars_of_it
    outcome = ResultLine(name="engine", figures=figures, bars=tuple(bars))
    outcome.print()
    return 0 if outcome.holds else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens a second of the engine against generate.")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"a round (default {REQUESTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each race (default {ROUNDS})")
    parser.add_argument("--compared", type=int, default=1_000, help="chats compared, each trained model (default 1000)")
    parser.add_argument("--only", choices=(*ARCHITECTURES, "random"), action="append", help="repeatable")
    add_model_options(parser)
    options = parser.parse_args()
    if options.dtype != "float32" and not options.published:
        parser.error("--dtype is of a published size; name one by --published")
    return options


def _races(options: argparse.Namespace) -> Iterator[tuple[str, Race]]:
    if options.published:
        for name in options.published:
            yield name, text.published(name, options.requests, placement_of(options))
        return
    for name in options.only or ("random", *ARCHITECTURES):
        if name == "random":
            yield name, text.small(options.requests, options.device)
        else:
            yield name, _trained(name, options.requests, options.device)


def _trained(architecture: Architecture, requests: int, device: str) -> Race:
    """Race a trained model, chats about pages, encoding among what is timed."""
    model = trained.Trained(architecture, device)
    asked = model.raced(requests, text.WRITTEN, seed=9)
    written = sum(each.written for each in asked)
    return Race(
        {
            "sequential": Way(
                lambda: [model.generate([each], each.written, to_the_end=True)[0] for each in asked], written
            ),
            "static": Way(lambda: trained.static_batches(model, asked, STREAMS), written),
            "engine": Way(lambda: trained.continuous(model, asked, STREAMS), written),
        },
        device,
    )


def _identity(
    name: Architecture, options: argparse.Namespace, progress: Progress
) -> tuple[dict[str, float], list[Threshold]]:
    count = options.compared
    task = progress.add_task(f"{name}, compared with generate", total=count)
    model = trained.Trained(name, options.device)
    found = trained.identity(model, count, lambda: progress.advance(task))
    told = {f"{name}_{key}": value for key, value in asdict(found).items()}
    return told, [threshold(f"{name}: of {count} chats, cancels between, those that differ", found.differing, "==", 0)]


if __name__ == "__main__":
    sys.exit(main())
