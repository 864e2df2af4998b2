"""Job strategies: for each job size and floor the cheapest way to answer it.

A strategy says how many rows of a job each way gets, in which batches. Its accuracy is the expectation over its rows.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field

from trimtab_pipelines.accuracy_floor import required_mean
from trimtab_pipelines.quantity import Cores, Fraction
from trimtab_pipelines.resource import Model, Name
from trimtab_pipelines.row_splits import (
    UNIT,
    BatchSplit,
    ParetoFront,
    SplitOption,
    cheapest_batches,
    escalation_option,
    pareto_fronts,
    undominated,
)
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS


class WayOut(Model):
    """One way to answer rows, and the batches that cost least for each number of them."""

    name: str = Field(min_length=1, max_length=128)
    point: Name = Field(description="Operating point that sees all its rows")
    then: Name | None = Field(default=None, description="Operating point that sees the least certain rows again")
    share: Fraction = Field(default=0.0, description="Share of the rows that are seen again, the least certain ones")
    accuracy: Fraction
    seconds: tuple[float, ...] = Field(max_length=4097, description="Of 0, 1, 2, … rows in their cheapest batches")


class Strategy(Model):
    """One split of a job."""

    accuracy: Fraction = Field(description="Expected of a row, on average over the job")
    seconds: float = Field(ge=0, description="Of all batches, one after the other")
    rows: dict[str, int] = Field(description="Rows by way")


class JobSize(Model):
    """The strategies for jobs of one size that no other beats, from the fastest to the most accurate."""

    rows: int = Field(ge=1)
    strategies: tuple[Strategy, ...] = Field(min_length=1, max_length=65536)

    @cached_property
    def _units(self) -> list[int]:
        return [round(strategy.accuracy * self.rows / UNIT) for strategy in self.strategies]

    def cheapest(self, floor: float, probability: float | None = None) -> Strategy | None:
        """The fastest strategy that meets a floor (see `floors.needed_mean`); None where none does."""
        mean = required_mean(floor, self.rows, probability)
        place = bisect_left(self._units, round(mean / UNIT) * self.rows)
        return self.strategies[place] if place < len(self.strategies) else None


class JobStrategies(Model):
    """All strategies of one variant on one kind of hardware."""

    pipeline: Name
    stage: Name
    variant: Name
    cores: Cores = Field(gt=0)
    ways: tuple[WayOut, ...] = Field(min_length=1, max_length=256)
    sizes: tuple[JobSize, ...] = Field(min_length=1, max_length=4096, description="By rows: 1, 2, 3, …")

    def of(self, rows: int) -> JobSize:
        """Those for so many rows; KeyError names the largest size there is."""
        if not 1 <= rows <= len(self.sizes):
            raise KeyError(f"strategies of {self.stage}/{self.variant} are for 1 to {len(self.sizes)} rows, not {rows}")
        return self.sizes[rows - 1]


@dataclass(frozen=True, slots=True)
class Variant:
    """Whose strategies they are."""

    pipeline: str
    stage: str
    name: str
    cores: float


@dataclass(frozen=True, slots=True)
class PointCost:
    """What strategies are made of: an operating point, its accuracy, and seconds of batches of 1, 2, … rows."""

    name: str
    accuracy: float
    batch_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Escalation:
    """Measured: all rows at one point, the least certain share of them at another as well, and what is right then."""

    first: str
    then: str
    share: float
    accuracy: float

    @property
    def name(self) -> str:
        """As splits tell it."""
        return f"{self.first}>{self.then}@{self.share:.2f}"


def strategies_of(
    variant: Variant,
    points: Sequence[PointCost],
    escalations: Iterable[Escalation] = (),
    most_rows: int = MAX_SPLIT_ROWS,
) -> JobStrategies:
    """Compute all strategies of a variant from what was measured of its points."""
    batches = {point.name: cheapest_batches(point.batch_seconds, most_rows) for point in points}
    outs = {point.name: _plain(point, batches[point.name]) for point in points}
    outs |= {escalation.name: _escalating(escalation, batches) for escalation in escalations}
    ways = undominated([SplitOption(out.name, out.accuracy, out.seconds) for out in outs.values()])
    sizes = tuple(_size(rows, front, ways) for rows, front in enumerate(pareto_fronts(ways, most_rows)) if rows)
    return JobStrategies(
        pipeline=variant.pipeline,
        stage=variant.stage,
        variant=variant.name,
        cores=variant.cores,
        ways=tuple(outs[way.name] for way in ways),
        sizes=sizes,
    )


def _plain(point: PointCost, batches: BatchSplit) -> WayOut:
    return WayOut(name=point.name, point=point.name, accuracy=point.accuracy, seconds=batches.seconds)


def _escalating(escalation: Escalation, batches: Mapping[str, BatchSplit]) -> WayOut:
    first, then = batches[escalation.first], batches[escalation.then]
    way = escalation_option(escalation.name, first, then, escalation.share, escalation.accuracy)
    return WayOut(
        name=way.name,
        point=escalation.first,
        then=escalation.then,
        share=escalation.share,
        accuracy=way.accuracy,
        seconds=way.seconds,
    )


def _size(rows: int, front: ParetoFront, ways: Sequence[SplitOption]) -> JobSize:
    names = [way.name for way in ways]
    return JobSize(
        rows=rows,
        strategies=tuple(
            _strategy(accuracy, seconds, dict(zip(names, split, strict=True)))
            for accuracy, seconds, split in zip(
                front.accuracy.tolist(), front.seconds.tolist(), front.rows.tolist(), strict=True
            )
        ),
    )


def _strategy(accuracy: float, seconds: float, rows: Mapping[str, int]) -> Strategy:
    given = {way: count for way, count in rows.items() if count}
    return Strategy(accuracy=min(accuracy, 1.0), seconds=seconds, rows=given)
