"""Array form of a program: undominated options per stage, minimum needs per suffix of stages, and partial choices."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.program import COST, TOLERANCE, Program

_FIGURES = attrgetter("latency_seconds", "value", "batch_size", "penalty", "cores", "gpus", "cost")
Floats = NDArray[np.float64]
Resource = Literal["second", "floor"] | int
"""A constraint: the SLO, the accuracy floor, or the index of a limit in `ProgramArrays`."""


@dataclass(frozen=True, slots=True)
class Column:
    """The options of one stage that may be part of an optimum, by rising value; every array has shape [options]."""

    index: NDArray[np.intp]
    """Index of each in the program's own list."""
    seconds: Floats
    cost: Floats
    """Loss of objective: β·cost + δ·batch + switching cost."""
    uses: Floats
    """Of the limits that bind, of shape [limits, options]."""
    value: Floats
    """Factor of the product, or share of the mean."""
    same: NDArray[np.bool_]
    """Runs the model that `Program.other_than` names."""
    disaggregated: NDArray[np.int8]
    """1: disaggregated; 0: colocated; −1: fits both."""


@dataclass(frozen=True, slots=True)
class ProgramArrays:
    """The program's columns and the bounds that prune partial choices. Arrays over stages have one entry more."""

    columns: tuple[Column, ...]
    live: tuple[tuple[tuple[int, ...], ...], ...]
    """Groups of stages whose finish is still awaited after each stage."""
    min_tail: tuple[float, ...]
    """Least seconds from the end of a stage to the end of the pipeline."""
    flow: tuple[float, ...]
    """Share of a unit of flow through each stage; 1 in a chain."""
    limits: tuple[float, ...]
    """Those that bind: some choice of options that fit alone exceeds them."""
    min_uses: Floats
    """Of the stages from k on, of shape [limits, stages + 1]."""
    max_value: Floats
    is_product: bool
    differs: bool
    """Whether `Program.other_than` is set."""
    has_placement_choice: bool
    """Whether there are options of both encoder placements."""


def to_arrays(program: Program) -> ProgramArrays | None:
    """Prune each stage and bound each suffix; None if a stage has no option that fits alone."""
    is_product = program.metric == "Product"
    figures = [_StageFigures.of(program, k) for k in range(len(program.stages))]
    if not all(stage.fits.any() for stage in figures):
        return None
    most = sum(stage.uses[:, stage.fits].max(axis=1) for stage in figures)
    binding = np.nonzero(most > np.array(program.limits) + TOLERANCE)[0]
    columns = [_column(program, k, stage, binding, is_product=is_product) for k, stage in enumerate(figures)]
    predecessors = [stage.predecessors for stage in program.stages]
    values = [column.value.max() for column in columns]
    return ProgramArrays(
        columns=tuple(columns),
        live=_live(predecessors),
        min_tail=_min_tail(predecessors, [float(column.seconds.min()) for column in columns]),
        flow=_flow(predecessors),
        limits=tuple(program.limits[n] for n in binding),
        min_uses=np.array([_suffix_sum([c.uses[n].min() for c in columns]) for n in range(binding.size)]),
        max_value=np.cumprod([1.0, *values[::-1]])[::-1] if is_product else _suffix_sum(values),
        is_product=is_product,
        differs=program.other_than is not None,
        has_placement_choice=program.has_placement_choice,
    )


@dataclass(frozen=True, slots=True)
class _StageFigures:
    """Figures of all options of one stage."""

    seconds: Floats
    value: Floats
    cost: Floats
    uses: Floats
    """Of all limits."""
    fits: NDArray[np.bool_]
    """Whether an option alone keeps the SLO and every limit."""

    @classmethod
    def of(cls, program: Program, k: int) -> Self:
        weights, options, limits = program.weights, program.stages[k].options, program.limits
        figures = np.array([*map(_FIGURES, options)], dtype=np.float64).reshape(-1, 7)
        flavors = np.array([[o.flavors.get(name, 0.0) for o in options] for name, _ in program.flavors])
        seconds, value, batch, penalty = figures.T[:4]
        uses = [*figures.T[4:], *flavors]
        fits = seconds <= program.slo_seconds + TOLERANCE
        for used, limit in zip(uses, limits, strict=True):
            fits &= used <= limit + TOLERANCE
        return cls(seconds, value, weights.cost * uses[COST] + weights.batch * batch + penalty, np.array(uses), fits)


def _column(program: Program, k: int, figures: _StageFigures, binding: NDArray[np.intp], *, is_product: bool) -> Column:
    options, seconds, value, cost = program.stages[k].options, figures.seconds, figures.value, figures.cost
    uses, same = figures.uses[binding], np.zeros(len(options), dtype=np.bool_)
    criteria = [cost, seconds, -value, *uses]
    if program.other_than is not None:
        same = np.array([option.model == program.other_than[k] for option in options], dtype=np.bool_)
        criteria.append(same.astype(np.float64))
    disaggregated = np.array([-1 if o.disaggregated is None else int(o.disaggregated) for o in options], dtype=np.int8)
    if program.has_placement_choice:  # options of different placements do not dominate each other
        criteria += [disaggregated.astype(np.float64), -disaggregated.astype(np.float64)]
    fitting = np.nonzero(figures.fits)[0]
    kept = fitting[undominated([criterion[fitting] for criterion in criteria])]
    kept = kept[np.argsort(value[kept], kind="stable")]
    share = value if is_product else value / len(program.stages)
    return Column(kept, seconds[kept], cost[kept], uses[:, kept], share[kept], same[kept], disaggregated[kept])


def _suffix_sum(parts: Sequence[float]) -> Floats:
    return np.cumsum([0.0, *parts[::-1]])[::-1]


def _live(predecessors: Sequence[tuple[int, ...]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """After each stage, the finished stages that later ones wait for, in groups.

    Stages that the same later stages wait for form one group, of which only the last to finish matters. Parallel
    branches that join in one stage therefore cost a single figure.
    """
    groups = []
    for k in range(len(predecessors)):
        waiting: dict[frozenset[int], list[int]] = {}
        for stage in range(k + 1):
            readers = frozenset(r for r in range(k + 1, len(predecessors)) if stage in predecessors[r])
            if readers:
                waiting.setdefault(readers, []).append(stage)
        groups.append(tuple(tuple(group) for group in waiting.values()))
    return tuple(groups)


def _min_tail(predecessors: Sequence[tuple[int, ...]], least_seconds: Sequence[float]) -> tuple[float, ...]:
    tails = [0.0] * len(predecessors)
    for reader in reversed(range(len(predecessors))):
        for stage in predecessors[reader]:
            tails[stage] = max(tails[stage], least_seconds[reader] + tails[reader])
    return tuple(tails)


def _flow(predecessors: Sequence[tuple[int, ...]]) -> tuple[float, ...]:
    """Split one unit of flow evenly over sources and over successors.

    Σ flow·seconds is an average over paths, so it is at most the latency of the slowest: a price on it bounds from
    above.
    """
    readers = [[r for r, waits_for in enumerate(predecessors) if k in waits_for] for k in range(len(predecessors))]
    sources = sum(not waits_for for waits_for in predecessors)
    flow = [0.0 if waits_for else 1.0 / sources for waits_for in predecessors]
    for stage, read_by in enumerate(readers):
        for reader in read_by:
            flow[reader] += flow[stage] / len(read_by)
    return tuple(flow)


@dataclass(frozen=True, slots=True)
class Labels:
    """Partial choices; arrays of shape [labels], `finish` of shape [live groups of stages, labels]."""

    value: Floats
    cost: Floats
    uses: Floats
    """Of the limits that bind, of shape [limits, labels]."""
    flow_seconds: Floats
    same: NDArray[np.bool_]
    disaggregated: NDArray[np.int8]
    finish: Floats
    parent: NDArray[np.intp]
    option: NDArray[np.intp]

    def take(self, which: NDArray[np.intp]) -> "Labels":
        return Labels(*(getattr(self, name)[..., which] for name in self.__slots__))


def root(program: Program, arrays: ProgramArrays) -> Labels:
    """The label without any chosen option."""
    zero, nothing = np.zeros(1), np.zeros(1, dtype=np.intp)
    start = np.full(1, 1.0 if program.metric == "Product" else 0.0)
    same, disaggregated = np.array([program.other_than is not None]), np.full(1, -1, dtype=np.int8)
    uses = np.zeros((len(arrays.limits), 1))
    return Labels(start, zero, uses, zero, same, disaggregated, np.zeros((0, 1)), nothing, nothing)
