"""Three ways to answer the same requests, in turns: one after another, in static batches, and in the engine."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.progress import Progress
from torch import Tensor

from trimtab_model_servers.engine.core import EngineCore, EngineEvent
from trimtab_model_servers.engine.model_adapters import adapt_model
from trimtab_model_servers.engine.request import Request, TokenChunk
from trimtab_model_servers.engine.scheduler import EngineLimits
from trimtab_pipelines.result_line import Threshold, threshold

STREAMS: Final = 16
OVER_SEQUENTIAL, OVER_STATIC = 4, 1.3
"""How many times a second's tokens the engine must write that the others write."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    tokens: tuple[int, ...]
    written: int


Answers = list[list[int]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to answer: what runs it, and how many tokens it writes."""

    run: Callable[[], Answers]
    written: int


class Race:
    """Ways that take turns; each must be given the same requests, or the first of them."""

    def __init__(self, ways: dict[str, Way], device: str = "cpu") -> None:
        self._ways = ways
        self._clock = clock_of(device)
        self._seconds: dict[str, list[float]] = {name: [] for name in ways}
        self._answers: dict[str, Answers] = {}

    def race(self, progress: Progress, name: str, rounds: int) -> dict[str, float]:
        """Run all ways in every round; return the most tokens a second of each."""
        task = progress.add_task(f"{name}, rounds", total=rounds * len(self._ways))
        for _ in range(rounds):
            for each, way in self._ways.items():
                started = self._clock()
                self._answers[each] = way.run()
                self._seconds[each].append(self._clock() - started)
                progress.advance(task)
        return {
            f"{each}_tokens_per_second": round(way.written / min(self._seconds[each]), 1)
            for each, way in self._ways.items()
        }

    @property
    def differing(self) -> int:
        """How many answers the engine wrote otherwise than ``generate`` did alone."""
        alone = self._answers["sequential"]
        return sum(one != other for one, other in zip(alone, self._answers["engine"][: len(alone)], strict=True))

    def bars(self, name: str) -> list[Threshold]:
        """How much faster the engine is than each of the others: the median of the rounds' ratios."""
        every = zip(*(self._rates(each) for each in ("sequential", "static", "engine")), strict=True)
        ratios = [(engine / one, engine / static) for one, static, engine in every]
        one, static = (round(statistics.median(column), 3) for column in zip(*ratios, strict=True))
        return [
            threshold(f"{name}: engine over sequential generate, tokens a second", one, ">=", OVER_SEQUENTIAL),
            threshold(f"{name}: engine over static batches of {STREAMS}", static, ">=", OVER_STATIC),
        ]

    def _rates(self, name: str) -> list[float]:
        return [self._ways[name].written / took for took in self._seconds[name]]


def clock_of(device: str) -> Callable[[], float]:
    """Processor time where cores compute, so that others on the machine do not count; else time until all is done."""
    if device == "cpu":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


@torch.inference_mode()
def sequential(model: Any, asked: Sequence[Ask]) -> Answers:
    """One request after another."""
    answers = []
    for each in asked:
        ids = torch.tensor([each.tokens], device=model.device)
        wrote = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=each.written)
        answers.append(wrote[0, ids.shape[1] :].tolist())
    return answers


@torch.inference_mode()
def static_batches(model: Any, asked: Sequence[Ask]) -> Answers:
    """Batches of 16, padded to the left, each until its longest answer is written."""
    answers = []
    for start in range(0, len(asked), STREAMS):
        batch = asked[start : start + STREAMS]
        longest = max(len(each.tokens) for each in batch)
        padding = [longest - len(each.tokens) for each in batch]
        ids = [[0] * pad + list(each.tokens) for pad, each in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * len(each.tokens) for pad, each in zip(padding, batch, strict=True)]
        wrote = model.generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max(each.written for each in batch),
        )
        answers += [row[: each.written] for row, each in zip(wrote[:, longest:].tolist(), batch, strict=True)]
    return answers


def continuous(model: Any, asked: Sequence[Ask], step_tokens: int) -> Answers:
    """The engine, 16 streams at once, the next request when one ends."""
    longest = max(len(each.tokens) + each.written for each in asked)
    core = EngineCore(adapt_model(model), EngineLimits(slots=STREAMS, slot_tokens=longest, step_tokens=step_tokens))
    requests = (Request(str(number), each.tokens, max_new_tokens=each.written) for number, each in enumerate(asked))
    return answered(core, ((request, []) for request in requests))


def answered(core: EngineCore, asked: Iterable[tuple[Request, list[Tensor]]]) -> Answers:
    """What an engine writes of requests and their images, in their order, all asked before its first step."""
    answers: dict[str, list[int]] = {}

    def hear(event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            answers[event.request_id].append(event.token)

    for request, images in asked:
        answers[request.id] = []
        core.submit(request, images, hear)
    while core.step():
        pass
    return list(answers.values())
