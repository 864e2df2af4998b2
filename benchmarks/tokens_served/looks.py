"""A merged pass for all and a better one for the rows it doubts, beside every point alone: rows a second, and accuracy.

All ways serve the same images, which neither thresholds nor temperatures were fitted to (but for the 80 faces, of which
there are no others), in turns. Batches go to the replica by hand, so that each way is what it says: a router in closed
loop gives all rows the best point that it has time for, as it should.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.tokens_served.direct import BATCH, Direct
from benchmarks.tokens_served.queries import NUMBERS
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.plan import PointPlan
from trimtab_router.scheduling.policies.interface import Escalation
from trimtab_training.vit_tasks.datasets import TASKS
from trimtab_training.vit_tasks.labelled_samples import MAX_PER_TASK
from trimtab_training.vit_tasks.operating_points import gain

TURNS, WARMING_BATCHES = 10, 3
SECOND_SEED = 1_000
LEAST_SPEED, MOST_LOST = 1.3, 0.003
"""Of the plain point's throughput, and of accuracy: what a way must gain, and may lose."""
FASTER_TWICE = 0.98
"""Of the throughput that the profile promises of the plain point: a way that is not faster is not tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Images of all tasks, mixed: pixels uint8 [n, 1, side, side], tasks and labels int64 [n]."""

    pixels: NDArray[np.uint8]
    tasks: NDArray[np.int64]
    labels: NDArray[np.int64]

    @classmethod
    def drawn(cls) -> "Rows":
        """All held-out images of the tasks that no figure of the pipeline is of, in an order drawn once."""
        parts = []
        for task, draw in TASKS.items():
            images = (
                draw("held-out", MAX_PER_TASK, SECOND_SEED)
                if task in {"crops", "faces"}
                else draw("held-out", 10**4, 2)
            )
            first = 0 if task in {"crops", "faces"} else MAX_PER_TASK
            parts.append((images.pixels[first:].numpy(), NUMBERS[task], images.labels[first:].numpy()))
        pixels, labels = (np.concatenate([part[place] for part in parts]) for place in (0, 2))
        tasks = np.repeat([part[1] for part in parts], [len(part[2]) for part in parts])
        order = np.random.default_rng(0).permutation(len(labels))
        return cls(pixels[order], tasks[order], labels[order])

    def turns(self, most: int | None = None) -> list[NDArray[np.int64]]:
        """Which rows each turn serves."""
        return np.array_split(np.arange(min(len(self.labels), most or len(self.labels))), TURNS)


@dataclass(slots=True, eq=False)
class Way:
    """One way to serve, and what came of it.

    Attributes:
        name: for people.
        point: that all rows see.
        again: that the doubted see; None for none.
        seconds: of each turn.
        right: whether each row's answer was, in the order in which they were served.
        doubted: how many rows were looked at again.
    """

    name: str
    point: PointPlan
    again: PointPlan | None = None
    seconds: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    doubted: int = 0

    @property
    def below(self) -> NDArray[np.float64]:
        """Confidence that too little is, by the number of the task."""
        again = Escalation(**dict(self.point.escalations[0])).rule
        return np.array([again.for_task(task).confidence_below for task in TASKS])

    @property
    def promised(self) -> float:
        """Accuracy by the pipeline's figures."""
        return self.point.escalations[0].accuracy if self.again is not None else self.point.accuracy


def row_seconds(point: PointPlan) -> float:
    """Of a row in the batches that are served, by the profile."""
    return point.service_seconds[BATCH] / BATCH


def ways(points: Sequence[PointPlan]) -> list[Way]:
    """The plain point, each other alone, and from each that has second looks the fastest that may meet the bar."""
    plain = points[0]
    by_name = {point.name: point for point in points}
    found = [Way(point.name, point) for point in points]
    for point in points:
        for then in dict.fromkeys(look.to for look in point.escalations):
            looks = [look for look in point.escalations if look.to == then]
            look = _chosen(looks, plain.accuracy - MOST_LOST)
            way = Way(
                f"{point.name}, {look.share:.0%} again at {then}",
                point.model_copy(update={"escalations": (look,)}),
                by_name[then],
            )
            if row_seconds(point) + look.share * row_seconds(by_name[then]) < FASTER_TWICE * row_seconds(plain):
                found.append(way)
    return found


def _chosen(looks: Sequence[EscalationPlan], floor: float) -> EscalationPlan:
    """The second look that asks for the least rows of those that reach a floor; the most accurate where none does."""
    enough = [look for look in looks if look.accuracy >= floor]
    return min(enough, key=lambda look: look.share) if enough else max(looks, key=lambda look: look.accuracy)


async def serve(replica: Direct, way: Way, rows: Rows, turn: NDArray[np.int64]) -> None:
    """Serve some rows one way, in full batches one behind the other; what came of it is added to the way."""
    labels = np.full(len(rows.labels), -1, np.int64)
    doubted: list[int] = []

    async def run(batch: NDArray[np.int64], point: PointPlan) -> NDArray[np.float32]:
        """Take the answers of a batch; how certain each is."""
        answer = await replace(replica, pixels=rows.pixels[batch]).infer(rows.tasks[batch].tolist(), point.name)
        outputs = {tensor.name: tensor.array.reshape(-1) for tensor in answer.outputs}
        labels[batch] = outputs["label"]
        confidences: NDArray[np.float32] = outputs["confidence"]
        return confidences

    async def again(least: int) -> None:
        """Look again at those that are doubted, as long as there are so many."""
        while way.again is not None and len(doubted) >= least:
            batch, doubted[:] = np.array(doubted[:BATCH]), doubted[BATCH:]
            await run(batch, way.again)
            way.doubted += len(batch)

    began = time.perf_counter()
    for first in range(0, len(turn), BATCH):
        batch = turn[first : first + BATCH]
        confidences = await run(batch, way.point)
        if way.again is not None:
            doubted += batch[confidences < way.below[rows.tasks[batch]]].tolist()
        await again(BATCH)
    await again(1)
    way.seconds.append(time.perf_counter() - began)
    way.right += (labels[turn] == rows.labels[turn]).tolist()


async def in_turns(replica: Direct, found: Sequence[Way], rows: Rows, most: int | None = None) -> None:
    """Serve all rows every way, turn by turn, the ways in another order each time."""
    for number, turn in enumerate(rows.turns(most)):
        for way in (*found[number % len(found) :], *found[: number % len(found)]):
            await replica.milliseconds([way.point.name], WARMING_BATCHES)
            await serve(replica, way, rows, turn)


@dataclass(frozen=True, slots=True)
class Compared:
    """A way beside the plain point: times its throughput, turn by turn, and what it loses of accuracy (95 %)."""

    way: Way
    rows_per_second: float
    speeds: tuple[float, float, float]
    lost: tuple[float, float, float]

    @property
    def meets(self) -> bool:
        """Whether it is as much faster, and as accurate, as the bar asks."""
        return self.speeds[1] >= LEAST_SPEED and self.lost[1] <= MOST_LOST

    def line(self) -> tuple[str, ...]:
        """A row of the table."""
        low, middle, high = (100 * one for one in self.lost)
        return (
            self.way.name,
            str(len(self.way.right)),
            f"{self.rows_per_second:.1f}",
            f"{self.speeds[1]:.2f} ({self.speeds[0]:.2f}–{self.speeds[2]:.2f})",
            f"{np.mean(self.way.right):.4f}",
            f"{self.way.promised:.4f}",
            f"{middle:+.2f} ({low:+.2f} to {high:+.2f})",
            f"{100 * self.way.doubted / len(self.way.right):.1f} %",
            "yes" if self.meets else "no",
        )


HEADS = (
    "way",
    "rows",
    "rows/s",
    "× plain (turns)",
    "accuracy",
    "promised",
    "points lost (95 %)",
    "looked at again",
    "meets the bar",
)


def compared(found: Sequence[Way]) -> Iterator[Compared]:
    """Every way beside the first, on the same rows."""
    plain = found[0]
    for way in found:
        speeds = np.quantile(np.array(plain.seconds) / np.array(way.seconds), (0, 0.5, 1))
        change = gain(np.array(plain.right), np.array(way.right))
        lost = (-change["high"], -change["gain"], -change["low"])
        low, middle, high = speeds.tolist()
        yield Compared(way, len(way.right) / sum(way.seconds), (low, middle, high), lost)
