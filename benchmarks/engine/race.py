"""Throughput comparison of sequential generation, static batches and the engine, in interleaved rounds."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.harness.report import Report
from trimtab_model_servers.engine.core import EngineCore, EngineEvent
from trimtab_model_servers.engine.request import Request, TokenChunk

STREAMS: Final = 16
MIN_OVER_SEQUENTIAL, MIN_OVER_STATIC = 4, 1.3
"""Speed-ups of the engine, in tokens per second."""
Outputs = list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids of a prompt and the length of its output."""

    tokens: tuple[int, ...]
    output_tokens: int


AnyPrompt_contra = TypeVar("AnyPrompt_contra", bound=Prompt, contravariant=True)


class Model(Protocol[AnyPrompt_contra]):
    """Model that transformers' `generate` and the engine run."""

    def generate(self, batch: Sequence[AnyPrompt_contra], max_tokens: int) -> Outputs: ...

    def run_engine(self, prompts: Sequence[AnyPrompt_contra]) -> Outputs: ...


class Race:
    """Three methods that take turns at the same prompts; sequential generation may get only the first ones."""

    def __init__(
        self,
        model: Model[AnyPrompt_contra],
        prompts: Sequence[AnyPrompt_contra],
        device: str,
        sequential: int | None = None,
    ) -> None:
        first = prompts[:sequential]
        self._methods: dict[str, Callable[[], Outputs]] = {
            "sequential": lambda: [model.generate([prompt], prompt.output_tokens)[0] for prompt in first],
            "static": lambda: _static_batches(model, prompts),
            "engine": lambda: model.run_engine(prompts),
        }
        tokens = sum(prompt.output_tokens for prompt in prompts)
        self._tokens = dict.fromkeys(self._methods, tokens)
        self._tokens["sequential"] = sum(prompt.output_tokens for prompt in first)
        self._clock = clock_of(device)
        self._rates: dict[str, list[float]] = {method: [] for method in self._methods}
        self._outputs: dict[str, Outputs] = {}

    def run(self, progress: Progress, name: str, rounds: int) -> None:
        """Run every method in every round."""
        task = progress.add_task(f"{name}, rounds", total=rounds * len(self._methods))
        for _ in range(rounds):
            for method, generate in self._methods.items():
                started = self._clock()
                self._outputs[method] = generate()
                self._rates[method].append(self._tokens[method] / (self._clock() - started))
                progress.advance(task)

    @property
    def differing(self) -> int:
        """The number of the engine's outputs that differ from those of sequential `generate`."""
        expected = self._outputs["sequential"]
        outputs = self._outputs["engine"][: len(expected)]
        return sum(output != reference for output, reference in zip(outputs, expected, strict=True))

    def judge(self, report: Report, name: str) -> None:
        """Add each method's best tokens per second, and the engine's median speed-up over the rounds."""
        report.add(
            {f"{name}_{method}_tokens_per_second": round(max(rates), 1) for method, rates in self._rates.items()}
        )
        label = f"{name}: engine over"
        over_sequential, over_static = self._speed_up("sequential"), self._speed_up("static")
        report.hold(f"{label} sequential generate, tokens a second", over_sequential, ">=", MIN_OVER_SEQUENTIAL)
        report.hold(f"{label} static batches of {STREAMS}", over_static, ">=", MIN_OVER_STATIC)

    def _speed_up(self, method: str) -> float:
        pairs = zip(self._rates["engine"], self._rates[method], strict=True)
        return round(statistics.median(engine / baseline for engine, baseline in pairs), 3)


def clock_of(device: str) -> Callable[[], float]:
    """Return a clock: processor time on a CPU, which excludes other processes, or synchronized wall-clock time."""
    if device == "cpu":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def _static_batches(model: Model[AnyPrompt_contra], prompts: Sequence[AnyPrompt_contra]) -> Outputs:
    """Generate in batches, each as long as its longest output."""
    outputs = []
    for start in range(0, len(prompts), STREAMS):
        batch = prompts[start : start + STREAMS]
        rows = model.generate(batch, max(prompt.output_tokens for prompt in batch))
        outputs += [row[: prompt.output_tokens] for row, prompt in zip(rows, batch, strict=True)]
    return outputs


def padded(batch: Sequence[Prompt], pad_id: int) -> dict[str, Tensor]:
    """Return the token ids of a batch, padded on the left, and their attention mask, both [B, T]."""
    longest = max(len(prompt.tokens) for prompt in batch)
    padding = [longest - len(prompt.tokens) for prompt in batch]
    ids = [[pad_id] * pad + list(prompt.tokens) for pad, prompt in zip(padding, batch, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def run_engine(core: EngineCore, requests: Iterable[tuple[Request, list[Tensor]]]) -> Outputs:
    """Return the outputs of requests and their images, all submitted before the first step."""
    outputs: dict[str, list[int]] = {}

    def receive(event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            outputs[event.request_id].append(event.token)

    for request, images in requests:
        outputs[request.id] = []
        core.submit(request, images, receive)
    while core.step():
        pass
    return list(outputs.values())
