"""Every experiment as a cell that a process of its own can compute; what they came to, and which bars hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from benchmarks.modserve.cluster import ALERT_MONOLITH, DECOUPLED, MONOLITH, OURS, ROUTED, SCHEDULED, SLO_FACTOR, System
from benchmarks.modserve.day import Day, day
from benchmarks.modserve.evaluation import Figures, at_load, balanced, mixture, most_load, sizes
from benchmarks.modserve.paper import GPUS, MODELS, PAPER, Profile
from trimtab_loadtester.multimodal.traffic import Traffic
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

SYSTEMS: Final = (MONOLITH, DECOUPLED, SCHEDULED, ROUTED, OURS, ALERT_MONOLITH)
IMAGE_COUNTS: Final = (0, 1, 2, 4, 8, 16)
FACTORS: Final = (15.0, 20.0, 30.0, 40.0)
LOADS: Final = (0.5, 1.0, 2.0, 4.0)
"""Of what the monolith carries, for the steps side by side."""
DAY_SHARE: Final = 0.25
"""Of what a monolith of 128 GPUs carries: with it the burst's busiest minutes fill them."""
DAY_MINUTES: Final = 180

Kind = Literal["most", "images", "factor", "step", "day"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to simulate. `value`: GPUs, images, factor, or load in what the monolith carries."""

    kind: Kind
    model: int
    system: int
    value: float

    @property
    def profile(self) -> Profile:
        """Of the model."""
        return MODELS[self.model]

    @property
    def runs(self) -> System:
        """What serves."""
        return SYSTEMS[self.system]


def cells() -> list[Cell]:
    """All of them."""
    found: list[Cell] = []
    for model in range(len(MODELS)):
        for system in range(len(SYSTEMS)):
            found += [
                Cell("most", model, system, gpus) for gpus in (GPUS, 5 * GPUS) if gpus == GPUS or system in (0, 3, 4)
            ]
            found += [Cell("step", model, system, load) for load in LOADS]
        for system in (0, 3, 4):
            found += [Cell("images", model, system, count) for count in IMAGE_COUNTS]
            found += [Cell("factor", model, system, factor) for factor in FACTORS]
        found += [Cell("day", model, system, 1.0) for system in (0, 4)]
    return found


def measure(seed: int, hours: Traffic, cell: Cell) -> tuple[Cell, float | Figures | Day]:
    """Simulate one; `hours` are those of a day."""
    profile, system = cell.profile, cell.runs
    draw = partial(mixture, images=int(cell.value)) if cell.kind == "images" else mixture
    size = sizes(system, texts=balanced(profile, draw, seed) if system is OURS else None)
    if cell.kind in ("images", "factor"):
        factor = cell.value if cell.kind == "factor" else SLO_FACTOR
        return cell, most_load(system, profile, size, draw, seed, factor)
    if cell.kind == "most":
        images, texts = size
        times = int(cell.value) // GPUS
        return cell, most_load(system, profile, (images * times, texts * times), draw, seed)
    carried = most_load(MONOLITH, profile, sizes(MONOLITH), mixture, seed)
    if cell.kind == "step":
        return cell, at_load(system, profile, size, cell.value * carried, seed)
    return cell, day(system, profile, hours.scaled(DAY_SHARE * carried), seed)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What all cells came to."""

    found: Mapping[Cell, Any]
    trace: str

    def number(self, kind: Kind, model: int, system: System, value: float) -> float:
        """Requests a second of a cell."""
        found: float = self.found[Cell(kind, model, SYSTEMS.index(system), value)]
        return found

    def step(self, model: int, system: System, load_share: float) -> Figures:
        """Seconds to the first token of a cell."""
        found: Figures = self.found[Cell("step", model, SYSTEMS.index(system), load_share)]
        return found

    def day(self, model: int, system: System) -> Day:
        """Hours with a burst."""
        found: Day = self.found[Cell("day", model, SYSTEMS.index(system), 1.0)]
        return found

    def gain(self, model: int, system: System, gpus: int = GPUS) -> float:
        """Most load within the promise over the monolith's."""
        return self.number("most", model, system, gpus) / max(self.number("most", model, MONOLITH, gpus), 1e-9)

    def fewer_gpus(self, model: int) -> float:
        """Share of the monolith's GPUs that ours does without, both following the load."""
        return 1 - self.day(model, OURS).mean_gpus / self.day(model, MONOLITH).mean_gpus


def judge(evaluation: Evaluation) -> ResultLine:
    """Judge ours by the paper's marks."""
    figures: dict[str, float | int | str | None] = {"trace": evaluation.trace}
    bars: list[Threshold] = []
    for model, profile in enumerate(MODELS):
        kind = "decoder-only" if profile.decoder_only else "cross-attention"
        for system in SYSTEMS:
            figures[f"{kind}_{system.name}_most_rps"] = evaluation.number("most", model, system, GPUS)
        for system in (ROUTED, OURS):
            figures[f"{kind}_{system.name}_over_monolith_on_640_gpus"] = evaluation.gain(model, system, 5 * GPUS)
        figures[f"{kind}_modserve_over_monolith"] = evaluation.gain(model, ROUTED)
        for name, system in (("monolith", MONOLITH), ("ours", OURS)):
            found = evaluation.day(model, system)
            figures[f"{kind}_{name}_mean_gpus"] = found.mean_gpus
            figures[f"{kind}_{name}_attainment"] = found.attainment
            bars.append(
                threshold(f"{kind}: {name} keeps its promise while it follows the load", found.attainment, ">=", 0.99)
            )
        over, fewer = evaluation.gain(model, OURS), evaluation.fewer_gpus(model)
        bars.append(threshold(f"{kind}: load over the monolith's", over, ">=", PAPER[f"throughput, {kind}"]))
        bars.append(threshold(f"{kind}: fewer GPUs, following the load", fewer, ">=", PAPER[f"fewer GPUs, {kind}"]))
    return ResultLine(name="reproduce-modserve", figures=figures, bars=tuple(bars))
