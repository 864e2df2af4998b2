"""``python -m benchmarks.engine``: 16 streams on one thread, three ways in turn, the same requests.

The last line is JSON. Prompts have 40 to 200 tokens and answers 16 to 128: a static batch waits for its longest, as
such batches do. The engine must write the tokens that `generate` writes alone; answers that differ are counted. Times
are this process's processor time, and each ratio is the median of the rounds'.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from trimtab_model_servers.engine.core import Core, Event
from trimtab_model_servers.engine.families import family_of
from trimtab_model_servers.engine.scheduler import Limits
from trimtab_model_servers.engine.values import Piece, Request
from trimtab_pipelines.verdict import Outcome, bar

STREAMS: Final = 16
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


def main() -> int:
    """Measure in turns, print a table's worth of lines and the verdict."""
    parser = argparse.ArgumentParser(description="Tokens a second of the engine against generate.")
    parser.add_argument("--requests", type=int, default=3 * STREAMS, help="how many requests a round (default 48)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = ask(options.requests)
    alone, served = tiny(), tiny()
    ways: dict[str, Callable[[], Answers]] = {
        "sequential": lambda: sequential(alone, asked),
        "static": lambda: static_batches(alone, asked),
        "engine": lambda: continuous(served, asked),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, Answers] = {}
    for _ in track(range(ROUNDS), "rounds", console=Console(stderr=True)):
        for name, run in ways.items():
            started = time.process_time()
            answers[name] = run()
            seconds[name].append(time.process_time() - started)
    written = sum(each.written for each in asked)
    over = {
        name: statistics.median(other / own for other, own in zip(seconds[name], seconds["engine"], strict=True))
        for name in ("sequential", "static")
    }
    differing = sum(one != other for one, other in zip(answers["sequential"], answers["engine"], strict=True))
    outcome = Outcome(
        name="engine",
        figures={
            "streams": STREAMS,
            "requests": len(asked),
            **{f"{name}_tokens_per_second": round(written / min(took), 1) for name, took in seconds.items()},
        },
        bars=(
            bar("engine over sequential generate, tokens per processor second", round(over["sequential"], 3), ">=", 4),
            bar("engine over static batches of 16", round(over["static"], 3), ">=", 1.3),
            bar("answers that differ from generate's", differing, "==", 0),
        ),
    )
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
