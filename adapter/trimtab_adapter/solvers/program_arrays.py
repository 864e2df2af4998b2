"""Array form of a program: undominated options per stage, minimum needs per suffix of stages, and partial choices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.option_table import Floats, OptionFigures, figures_of
from trimtab_adapter.solvers.program import COST, TOLERANCE, Program

Resource = Literal["second", "floor"] | int
"""A constraint: the SLO, the accuracy floor, or the index of a limit in `ProgramArrays`."""
_ROUNDING = 1e-9
"""By how much a product of accuracies is taken to be off."""


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
    span: Floats
    """The least and the greatest value of the stages before each one, rounding included; of shape [2, stages + 1]."""
    is_product: bool
    differs: bool
    """Whether `Program.other_than` is set."""
    has_placement_choice: bool
    """Whether there are options of both encoder placements."""


def to_arrays(program: Program) -> ProgramArrays | None:
    """Prune each stage and bound each suffix; None if a stage has no option that fits alone."""
    is_product = program.metric == "Product"
    flavors = [name for name, _ in program.flavors]
    figures = [figures_of(stage.options, flavors) for stage in program.stages]
    fitting = [_fitting(program, stage) for stage in figures]
    if not all(stage.size for stage in fitting):
        return None
    most = sum(stage.uses[:, fits].max(axis=1) for stage, fits in zip(figures, fitting, strict=True))
    binding = np.nonzero(most > np.array(program.limits) + TOLERANCE)[0]
    placements = np.concatenate([stage.disaggregated for stage in figures])
    places = bool((placements == 1).any() and (placements == 0).any())
    columns = [
        _column(program, k, figures[k], fits, binding, is_product=is_product, places=places)
        for k, fits in enumerate(fitting)
    ]
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
        span=_span([column.value for column in columns], is_product=is_product),
        is_product=is_product,
        differs=program.other_than is not None,
        has_placement_choice=places,
    )


def _span(values: Sequence[Floats], *, is_product: bool) -> Floats:
    extremes = np.array([(value.min(), value.max()) for value in values]).T
    if is_product:
        span = np.cumprod(np.column_stack((np.ones(2), extremes)), axis=1)
    else:
        span = np.cumsum(np.column_stack((np.zeros(2), extremes)), axis=1)
    return np.asarray(span * [[1 - _ROUNDING], [1 + _ROUNDING]])


def _fitting(program: Program, figures: OptionFigures) -> NDArray[np.intp]:
    """The options that alone keep the SLO and every limit."""
    fits = figures.seconds <= program.slo_seconds + TOLERANCE
    for used, limit in zip(figures.uses, program.limits, strict=True):
        fits &= used <= limit + TOLERANCE
    return np.nonzero(fits)[0]


def _column(
    program: Program,
    k: int,
    figures: OptionFigures,
    fitting: NDArray[np.intp],
    binding: NDArray[np.intp],
    *,
    is_product: bool,
    places: bool,
) -> Column:
    weights, seconds, value, placement = program.weights, figures.seconds, figures.value, figures.disaggregated
    cost = weights.cost * figures.uses[COST] + weights.batch * figures.batch_size + figures.penalty
    uses, same = figures.uses[binding], np.zeros(value.size, dtype=np.bool_)
    criteria = [cost, seconds, -value, *uses]
    if program.other_than is not None:
        same = np.array([option.model == program.other_than[k] for option in program.stages[k].options], dtype=np.bool_)
        criteria.append(same.astype(np.float64))
    if places:  # options of different placements do not dominate each other
        criteria += [placement, -placement]
    kept = fitting[undominated([criterion[fitting] for criterion in criteria])]
    kept = kept[np.argsort(value[kept], kind="stable")]
    share = value if is_product else value / len(program.stages)
    disaggregated = placement[kept].astype(np.int8)
    return Column(kept, seconds[kept], cost[kept], uses[:, kept], share[kept], same[kept], disaggregated)


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
