"""``python -m benchmarks.engine``: 16 streams on one thread, three ways in turn, the same requests.

The last line is JSON. First a model with random weights, prompts of 40 to 200 tokens; then the trained ones of
pipelines/lmm-digits, chats about pages. Answers have 16 to 128 tokens: a static batch waits for its longest,
as such batches do. The engine must write the tokens that `generate` writes alone; answers that differ are counted, and
of each trained model 1,000 chats more, as they end by themselves. Times are this process's processor time, and each
ratio is the median of the rounds'.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.engine import trained
from trimtab_model_servers.engine.core import Core, Event
from trimtab_model_servers.engine.families import family_of
from trimtab_model_servers.engine.scheduler import Limits
from trimtab_model_servers.engine.values import Piece, Request
from trimtab_model_servers.lmm_digits.models import ARCHITECTURES, Architecture
from trimtab_pipelines.verdict import Bar, Outcome, bar

STREAMS: Final = 16
REQUESTS: Final = 10 * STREAMS
"""A round. Its last answers have nobody behind them: of three batches' worth that is a third of the steps, which are
then not of sixteen streams."""
ROUNDS: Final = 3
VOCABULARY: Final = 512
PROMPT: Final = (40, 200)
WRITTEN: Final = (16, 128)
_TRANSFORMERS: Any = import_module("transformers")  # not by name: its own types take mypy minutes


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    tokens: tuple[int, ...]
    written: int


Answers = list[list[int]]


def tiny() -> Any:
    """A Llama of 0.9 million parameters, weights drawn with a fixed seed."""
    torch.manual_seed(5)
    config = _TRANSFORMERS.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    model = _TRANSFORMERS.LlamaForCausalLM(config).eval()
    model.generation_config = _TRANSFORMERS.GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def ask(count: int) -> list[Ask]:
    """Draw requests: lengths of prompts and answers uniform."""
    random = np.random.default_rng(9)
    prompts, written = random.integers(*PROMPT, size=count), random.integers(*WRITTEN, size=count)
    return [
        Ask(tuple(random.integers(1, VOCABULARY, size=prompt).tolist()), int(new))
        for prompt, new in zip(prompts, written, strict=True)
    ]


@torch.inference_mode()
def sequential(model: Any, asked: list[Ask]) -> Answers:
    """One request after another."""
    answers = []
    for each in asked:
        ids = torch.tensor([each.tokens])
        wrote = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=each.written)
        answers.append(wrote[0, ids.shape[1] :].tolist())
    return answers


@torch.inference_mode()
def static_batches(model: Any, asked: list[Ask]) -> Answers:
    """Batches of 16, padded to the left, each until its longest answer is written."""
    answers = []
    for start in range(0, len(asked), STREAMS):
        batch = asked[start : start + STREAMS]
        longest = max(len(each.tokens) for each in batch)
        ids = torch.tensor([[0] * (longest - len(each.tokens)) + list(each.tokens) for each in batch])
        mask = torch.tensor([[0] * (longest - len(each.tokens)) + [1] * len(each.tokens) for each in batch])
        new = max(each.written for each in batch)
        wrote = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new)[:, longest:].tolist()
        answers += [row[: each.written] for row, each in zip(wrote, batch, strict=True)]
    return answers


def continuous(model: Any, asked: list[Ask]) -> Answers:
    """The engine, 16 streams at once, the next request when one ends."""
    core = Core(family_of(model), Limits(slots=STREAMS, slot_tokens=sum(PROMPT) + WRITTEN[1], step_tokens=256))
    answers: Answers = [[] for _ in asked]

    def hear(event: Event) -> None:
        if isinstance(event, Piece):
            answers[int(event.request_id)].append(event.token)

    for number, each in enumerate(asked):
        core.submit(Request(str(number), each.tokens, max_new_tokens=each.written), [], hear)
    while core.step():
        pass
    return answers


Ways = dict[str, Callable[[], Answers]]


def main() -> int:
    """Measure in turns, print a table's worth of lines and the verdict."""
    parser = argparse.ArgumentParser(description="Tokens a second of the engine against generate.")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"a round (default {REQUESTS})")
    parser.add_argument("--compared", type=int, default=1_000, help="chats compared, each trained model (default 1000)")
    parser.add_argument("--only", choices=(*ARCHITECTURES, "random"), action="append", help="repeatable")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = options.only or ("random", *ARCHITECTURES)
    figures: dict[str, float] = {"streams": STREAMS, "requests": options.requests}
    bars: list[Bar] = []
    with Progress(console=Console(stderr=True)) as progress:
        for name in chosen:
            measured = _random(options.requests) if name == "random" else _trained(name, options.requests)
            figures |= {f"{name}_{key}": value for key, value in measured.race(progress, name).items()}
            bars += measured.bars(name)
            if name != "random":
                told, bars_of_it = _identity(name, options.compared, progress)
                figures |= told
                bars += bars_of_it
    outcome = Outcome(name="engine", figures=figures, bars=tuple(bars))
    outcome.print()
    return 0 if outcome.holds else 1


class Race:
    """Three ways to answer the same requests, in turns."""

    def __init__(self, ways: Ways, written: int) -> None:
        self._ways = ways
        self._written = written
        self._seconds: dict[str, list[float]] = {name: [] for name in ways}
        self._answers: dict[str, Answers] = {}

    def race(self, progress: Progress, name: str) -> dict[str, float]:
        """Run all ways in every round; return the tokens a second of each."""
        task = progress.add_task(f"{name}, rounds", total=ROUNDS * len(self._ways))
        for _ in range(ROUNDS):
            for way, run in self._ways.items():
                started = time.process_time()
                self._answers[way] = run()
                self._seconds[way].append(time.process_time() - started)
                progress.advance(task)
        return {f"{way}_tokens_per_second": round(self._written / min(took), 1) for way, took in self._seconds.items()}

    def bars(self, name: str) -> list[Bar]:
        """How much faster the engine is than each of the others, and how many of its answers differ."""
        own = self._seconds["engine"]
        over = {
            way: round(statistics.median(other / mine for other, mine in zip(self._seconds[way], own, strict=True)), 3)
            for way in ("sequential", "static")
        }
        pairs = zip(self._answers["sequential"], self._answers["engine"], strict=True)
        differing = sum(one != other for one, other in pairs)
        return [
            bar(f"{name}: engine over sequential generate, tokens per processor second", over["sequential"], ">=", 4),
            bar(f"{name}: engine over static batches of 16", over["static"], ">=", 1.3),
            bar(f"{name}: long answers that differ from generate's", differing, "==", 0),
        ]


def _random(requests: int) -> Race:
    asked, alone, served = ask(requests), tiny(), tiny()
    ways: Ways = {
        "sequential": lambda: sequential(alone, asked),
        "static": lambda: static_batches(alone, asked),
        "engine": lambda: continuous(served, asked),
    }
    return Race(ways, sum(each.written for each in asked))


def _trained(architecture: Architecture, requests: int) -> Race:
    """The same with a trained model, chats about pages, encoding among what is timed."""
    model = trained.Trained(architecture)
    asked = model.raced(requests, WRITTEN, seed=9)
    ways: Ways = {
        "sequential": lambda: [model.generate([each], each.written, to_the_end=True)[0] for each in asked],
        "static": lambda: trained.static_batches(model, asked, STREAMS),
        "engine": lambda: trained.continuous(model, asked, STREAMS),
    }
    return Race(ways, sum(each.written for each in asked))


def _identity(name: Architecture, count: int, progress: Progress) -> tuple[dict[str, float], list[Bar]]:
    task = progress.add_task(f"{name}, compared with generate", total=count)
    found = trained.identity(trained.Trained(name), count, lambda: progress.advance(task))
    told = {f"{name}_{key}": value for key, value in asdict(found).items()}
    return told, [bar(f"{name}: of {count} chats, cancels between, those that differ", found.differing, "==", 0)]


if __name__ == "__main__":
    sys.exit(main())
