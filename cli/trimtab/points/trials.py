"""Forms measured in this process: latency in rounds that take turns, and accuracy on a user's own samples."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from trimtab.points.choice import Trial, slower
from trimtab_loadtester.labelled import LabelledPayloads
from trimtab_loadtester.payload import Payload, Score
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.network import Network
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.tensors import to_torch
from trimtab_pipelines.evidence import Accuracy, mean_certainty, wilson_interval
from trimtab_pipelines.graph import split_reference
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipeline

Show = Callable[[str], None]
ROUNDS = 5
TIMING_SHARE = 0.4
"""Of the time there is, what timing may take where rounds and smaller batches can be left out."""
Inputs = Mapping[str, torch.Tensor]


class Bench:
    """The subject of trials, its model in memory once, at as many points as are tried."""

    def __init__(self, pipeline: InferencePipeline, folder: Path, points: Sequence[OperatingPoint]) -> None:
        """Load the model.

        Args:
            pipeline: of one stage with one variant (`subject_of`).
            folder: where its file is.
            points: that are tried.

        Raises:
            ValueError: its model cannot be loaded or cannot run at one of the points.
        """
        self._stage = pipeline.spec.stages[0]
        self._variant = self._stage.variants[0]
        served = model_spec(pipeline, folder, self._stage, self._variant, self._variant.resources.cpu)
        spec = served.model_copy(update={"operating_points": tuple(points)})
        torch.set_num_threads(spec.threads)
        try:
            self._network: Network = build(spec).network
        except ModelError as error:
            raise ValueError(str(error)) from error
        self.points = points
        self._outputs = {output.name: split_reference(output.source)[1] for output in pipeline.spec.outputs}
        self._inputs = {read.name: split_reference(read.source) for read in self._stage.inputs}

    @property
    def layers(self) -> tuple[int, int]:
        """Patches of an image, and layers; ValueError where the model is no vision transformer."""
        if not isinstance(self._network, ServedTransformer):
            raise ValueError(f"variant {self._variant.name}: family {self._variant.family!r} merges no tokens")
        shape = self._network.transformer.shape
        return shape.patches, shape.depth

    def rows(self, payloads: Sequence[Payload]) -> Inputs:
        """Stack samples as one batch of the stage's inputs."""
        named = [{tensor.name: tensor for tensor in payload.inputs} for payload in payloads]
        return {
            name: torch.cat([to_torch(given[source]) for given in named])
            for name, (_, source) in self._inputs.items()
            if source in named[0]
        }

    def run(self, inputs: Inputs, point: OperatingPoint) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Compute one batch: outputs by the names that a client sees, and certainties where the stage names its own."""
        with torch.inference_mode():
            found = self._network.infer(dict(inputs), point)
        certainty = self._stage.certainty
        told = None if certainty is None else found[certainty]
        return {name: found[source] for name, source in self._outputs.items()}, told


class Budget:
    """How long trials may take, from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock, self._began = seconds, clock, clock()

    def over(self, share: float = 1.0) -> bool:
        """Whether such a share of it is spent."""
        return self.clock() - self._began >= share * self.seconds


@dataclass(frozen=True, slots=True)
class Tried:
    """What was measured.

    Attributes:
        trials: the forms that were timed and judged, the model as it is first.
        row_seconds: of a row in the largest batch, of all forms by name.
        slow: why those that save no time were not judged, by name.
        unjudged: the names of those that nobody had time to judge.
    """

    trials: Sequence[Trial]
    row_seconds: Mapping[str, float]
    slow: Mapping[str, str]
    unjudged: Sequence[str]


def tried(
    bench: Bench, samples: LabelledPayloads, count: int, batches: Sequence[int], show: Show, budget: Budget
) -> Tried:
    """Time every point of a bench, and judge those that save time on the first so many samples.

    The budget ends it: what is judged by then counts. The model as it is, is timed and judged whatever that takes.
    """
    digest, largest, tasks = samples.digest(), max(batches), samples.tasks(count)
    seconds = _timed(bench, [samples.payload(index) for index in range(largest)], batches, show, budget)
    row_seconds = {name: taken[largest] / largest for name, taken in seconds.items()}
    full, *others = bench.points
    slow = {point.name: why for point in others if (why := slower(row_seconds[point.name], row_seconds[full.name]))}
    found = []
    for point in (point for point in bench.points if point.name not in slow):
        show(f"accuracy of {point.name}")
        limit = None if point is full else budget
        seen = _seen(bench, point, samples, count, largest, limit)
        if seen is not None:
            by_task = {task: _accuracy([one for one in seen if one.task == task], digest) for task in tasks}
            found.append(Trial(point, _accuracy(seen, digest, tasks), seconds[point.name], by_task))
    judged = {trial.point.name for trial in found}
    return Tried(found, row_seconds, slow, [name for name in row_seconds if name not in judged | slow.keys()])


class _Sample(NamedTuple):
    """What came of one sample."""

    score: Score
    certainty: float | None
    task: str


def _timed(
    bench: Bench, payloads: Sequence[Payload], batches: Sequence[int], show: Show, budget: Budget
) -> dict[str, dict[int, float]]:
    """Time all points in turn, round after round, so that what else the machine does falls on all alike.

    The largest batch is first, since it decides; of it there is one round at least.
    """
    found: dict[str, dict[int, float]] = {point.name: {} for point in bench.points}
    for batch in sorted(batches, reverse=True):
        if batch < max(batches) and budget.over(TIMING_SHARE):
            break
        inputs = bench.rows(payloads[:batch])
        taken: dict[str, list[float]] = {point.name: [] for point in bench.points}
        for turn in range(ROUNDS + 1):
            for point in bench.points:
                began = budget.clock()
                bench.run(inputs, point)
                if turn:  # the first warms up
                    taken[point.name].append(budget.clock() - began)
            show(f"latency at batch {batch}")
            if turn and budget.over(TIMING_SHARE):
                break
        for name, seconds in taken.items():
            found[name][batch] = statistics.median(seconds)
    return found


def _seen(
    bench: Bench, point: OperatingPoint, samples: LabelledPayloads, count: int, batch: int, budget: Budget | None
) -> list[_Sample] | None:
    """What came of so many samples at a point; None where the budget ends before."""
    found = []
    for low in range(0, count, batch):
        if budget is not None and budget.over():
            return None
        numbers = range(low, min(count, low + batch))
        payloads = [samples.payload(index) for index in numbers]
        outputs, certainties = bench.run(bench.rows(payloads), point)
        for row, (number, payload) in enumerate(zip(numbers, payloads, strict=True)):
            score = samples.score(payload.truth, {name: rows[row : row + 1].numpy() for name, rows in outputs.items()})
            certainty = None if certainties is None else float(certainties[row])
            found.append(_Sample(score, certainty, samples.task(number)))
    return found


def _accuracy(seen: Sequence[_Sample], digest: str, tasks: Sequence[str] = ()) -> Accuracy:
    """Of some samples; their tasks are those that are told apart."""
    right, total = sum(one.score.correct for one in seen), sum(one.score.total for one in seen)
    low, high = wilson_interval(right, total)
    return Accuracy(
        value=round(right / total, 4),
        source="Measured",
        samples=len(seen),
        low=math.floor(1e4 * low) / 1e4,
        high=min(1.0, math.ceil(1e4 * high) / 1e4),
        samples_digest=digest,
        mean_certainty=mean_certainty([math.nan if one.certainty is None else one.certainty for one in seen], tasks),
    )
