"""ModServe's evaluation, simulated: large multimodal models on 128 and 640 GPUs, in pools and as a monolith."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from benchmarks.harness import charts
from benchmarks.harness.grid import Cell, Evaluation, run_cells
from benchmarks.harness.options import find_trace, paper_parser
from benchmarks.harness.report import Page, Report, print_table
from benchmarks.papers.modserve_cluster import (
    ALERT_MONOLITH,
    ASSUMED,
    DECOUPLED,
    GPUS,
    IMAGE_GPUS,
    MODELS,
    MONOLITH,
    OURS,
    ROUTED,
    SCHEDULED,
    STEPS,
    TEXT_GPUS,
    Cluster,
    LatencyFigures,
    Profile,
    System,
    draw_mixture,
    sum_up,
)
from benchmarks.papers.modserve_day import Day, simulate_day
from benchmarks.papers.modserve_trace import HourlyRates, read_hours, read_minutes, traffic_of
from trimtab_loadtester.multimodal.rates import synthetic_rates
from trimtab_loadtester.multimodal.traffic import Traffic
from trimtab_predictor.trace import TraceError

TRACE, HOURS = "azure_lmm_per_minute_dev.csv.gz", "azure_lmm_hourly_dev.csv"
SYSTEMS: Final = {system.name: system for system in (MONOLITH, DECOUPLED, SCHEDULED, ROUTED, OURS, ALERT_MONOLITH)}
COMPARED: Final = (MONOLITH, ROUTED, OURS)
COLOURS: Final = dict(zip(SYSTEMS, ("#868d98", "#b0691c", "#e08a2e", "#9b7fd9", "#3f7fd9", "#5a9a6a"), strict=True))
MAX_LOAD, STEP, DAY = "most", "step", "day"
"""Experiments; their cells' factors are GPUs, load over the monolith's, 1."""
LOADS: Final = (0.5, 1.0, 2.0, 4.0)
DAY_SHARE: Final = 0.25
"""Load of the hours over what a monolith of 128 GPUs carries: the burst's busiest minutes fill them."""
DAY_MINUTES: Final = 180
ATTAINMENT: Final = 0.99
"""P99 within the SLO, in each kind of request."""
HALVINGS: Final = 9


def cells() -> list[Cell]:
    """Return the cells of all experiments."""
    wanted: list[Cell] = []
    for profile in MODELS:
        for name, system in SYSTEMS.items():
            gpus = (GPUS, 5 * GPUS) if system in COMPARED else (GPUS,)
            wanted += [Cell((MAX_LOAD, profile.name), name, count) for count in gpus]
            wanted += [Cell((STEP, profile.name), name, load) for load in LOADS]
        wanted += [Cell((DAY, profile.name), system.name) for system in (MONOLITH, OURS)]
    return wanted


@dataclass(frozen=True, slots=True)
class SystemRow:
    """Result of a cell: requests a second, the figures of a load, or hours with a burst."""

    cell: Cell
    max_rps: float = 0.0
    figures: LatencyFigures | None = None
    day: Day | None = None


def measure(seed: int, hours: Traffic, cell: Cell) -> SystemRow:
    """Simulate a cell; `hours` are those of the day, at one request a second."""
    experiment, model = cell.case
    profile = next(profile for profile in MODELS if profile.name == model)
    system = SYSTEMS[cell.method]
    size = system.sizes(texts=balanced_texts(profile, seed) if system is OURS else None)
    if experiment == MAX_LOAD:
        images, texts = size
        times = int(cell.factor) // GPUS
        return SystemRow(cell, max_load(system, profile, (images * times, texts * times), seed))
    carried = max_load(MONOLITH, profile, MONOLITH.sizes(), seed)
    if experiment == STEP:
        answers = Cluster(system, profile, size).run(draw_mixture(cell.factor * carried, seed))
        return SystemRow(cell, figures=sum_up(answers))
    return SystemRow(cell, day=simulate_day(system, profile, hours.scaled(DAY_SHARE * carried), seed))


def max_load(system: System, profile: Profile, size: tuple[int, int], seed: int) -> float:
    """Return the most requests a second with 99 of 100 of each kind in time; 0 if even a trickle is not."""

    def holds(rate: float) -> bool:
        return sum_up(Cluster(system, profile, size).run(draw_mixture(rate, seed))).attainment >= ATTAINMENT

    high = 4 * (size[0] / max(profile.encode, 1e-9) + size[1] / profile.prefill(100, 0))
    low = high / 4096
    if not holds(low):
        return 0.0
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def balanced_texts(profile: Profile, seed: int) -> int:
    """Return the text instances (of 128 GPUs) with which both pools are equally busy, by mean work of a request."""
    requests = draw_mixture(1.0, seed)
    encode = sum(request.images for request in requests) * profile.encode_alone
    prefill = sum(profile.prefill(request.text_tokens, request.images) for request in requests)
    return max(
        range(1, GPUS // TEXT_GPUS),
        key=lambda texts: min((GPUS - texts * TEXT_GPUS) / IMAGE_GPUS / max(encode, 1e-9), texts / prefill),
    )


def read_day(trace: Path | None, known: HourlyRates | None, minutes: int, seed: int) -> Traffic:
    """Return rates of each minute with a mean of one request a second; the middle third is a burst of images.

    `trace`: requests of each minute; None for synthetic ones. `known`: how many requests of each of the trace's hours
    had images. `minutes`: from the trace's first one on. `seed`: of synthetic minutes. Raises TraceError if the trace
    cannot be read, has fewer minutes, or no requests in them.
    """
    if trace is None:
        traffic = synthetic_rates(minutes, seed)
    else:
        counts = read_minutes(trace)
        if len(counts) < minutes:
            raise TraceError(f"{trace}: {len(counts)} minutes of requests; at least {minutes} are needed")
        traffic = traffic_of(counts[:minutes], known)
    try:
        return replace(traffic.scaled(1.0), bursts=np.arange(minutes) * 3 // minutes == 1)
    except ValueError as error:
        raise TraceError(f"{trace}: {error} in its first {minutes} minutes") from error


class Systems(Evaluation[SystemRow]):
    """Rows by experiment, model and system."""

    def max_rps(self, experiment: str, profile: Profile, system: System, value: float) -> float:
        return self.rows((experiment, profile.name), system.name, value)[0].max_rps

    def step(self, profile: Profile, system: System, load: float) -> LatencyFigures:
        figures = self.rows((STEP, profile.name), system.name, load)[0].figures
        if figures is None:
            raise ValueError(f"no figures of {profile.name}, {system.name} at {load:g} times the monolith's load")
        return figures

    def day(self, profile: Profile, system: System) -> Day:
        day = self.rows((DAY, profile.name), system.name)[0].day
        if day is None:
            raise ValueError(f"no hours of {profile.name}, {system.name}")
        return day

    def gain(self, profile: Profile, system: System, gpus: int = GPUS) -> float:
        """Return the most load within the SLO over the monolith's."""
        carried = (self.max_rps(MAX_LOAD, profile, which, gpus) for which in (system, MONOLITH))
        own, monolith = carried
        return own / max(monolith, 1e-9)

    def fewer_gpus(self, profile: Profile) -> float:
        """Return the share of the monolith's GPUs that ours saves, both following the load."""
        return 1 - self.day(profile, OURS).mean_gpus / self.day(profile, MONOLITH).mean_gpus


def judge(evaluation: Systems, trace: str) -> Report:
    """Compare ours with the paper's gains."""
    report = Report("reproduce-modserve", {"trace": trace})
    for profile in MODELS:
        kind = profile.kind
        for system in SYSTEMS.values():
            report.add({f"{kind}_{system.name}_most_rps": evaluation.max_rps(MAX_LOAD, profile, system, GPUS)})
        for system in (ROUTED, OURS):
            report.add({f"{kind}_{system.name}_over_monolith_on_640_gpus": evaluation.gain(profile, system, 5 * GPUS)})
        report.add({f"{kind}_modserve_over_monolith": evaluation.gain(profile, ROUTED)})
        for system in (MONOLITH, OURS):
            day = evaluation.day(profile, system)
            report.add({f"{kind}_{system.name}_mean_gpus": day.mean_gpus})
            report.add({f"{kind}_{system.name}_attainment": day.attainment})
            name = f"{kind}: {system.name} keeps its promise while it follows the load"
            report.hold(name, day.attainment, ">=", ATTAINMENT)
        gain, fewer = evaluation.gain(profile, OURS), evaluation.fewer_gpus(profile)
        report.hold(f"{kind}: load over the monolith's", gain, ">=", profile.throughput_gain)
        report.hold(f"{kind}: fewer GPUs, following the load", fewer, ">=", profile.fewer_gpus)
    return report


COLUMNS: Final = ("model", "system", "most load, requests/s", "over monolith", "mean first token", "P99", "paper")


def table_rows(evaluation: Systems) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for each model and system; seconds at twice what the monolith carries."""
    rows: list[tuple[str, ...]] = []
    for profile in MODELS:
        for system in SYSTEMS.values():
            figures = evaluation.step(profile, system, 2.0)
            rows.append(
                (
                    profile.name,
                    system.name,
                    f"{evaluation.max_rps(MAX_LOAD, profile, system, GPUS):.2f}",
                    f"{evaluation.gain(profile, system):.2f} x",
                    f"{figures.mean_seconds:.2f}",
                    f"{figures.p99_seconds:.2f}",
                    STEPS.get(system.name, ""),
                )
            )
    return rows


def build_page(evaluation: Systems, report: Report, trace: str) -> Page:
    lead = f"128 GPUs · minutes of the trace: {trace} · seconds in times of one image alone"
    page = Page("ModServe's evaluation", "simulated", lead)
    page.add_thresholds(report)
    page.add_chart(
        "Step by step",
        "P99 of the time to the first token by load, as shares of what the monolith carries.",
        _chart(
            (MONOLITH, DECOUPLED, SCHEDULED, ROUTED, OURS),
            LOADS,
            lambda profile, system, load: evaluation.step(profile, system, load).p99_seconds,
            x="load, in what the monolith carries",
            y="P99 first token",
            from_zero=False,
        ).update_yaxes(type="log"),
    )
    page.add_chart(
        "Hours with a burst",
        "GPUs in use, both following the load; a third of the time requests bring more images.",
        _day_chart(evaluation),
    )
    note = "Seconds at twice the monolith's load."
    page.add_table("All figures", note, COLUMNS, table_rows(evaluation), range(2, 6))
    page.add_notes("What is assumed", f"{ASSUMED}.")
    return page


def _chart(
    systems: Iterable[System], values: Sequence[float], figure: Callable[[Profile, System, float], float], **layout: Any
) -> go.Figure:
    """Return lines over some values, one a system, in a panel for each model."""
    columns = [
        (profile.name, [_line(system.name, values, [figure(profile, system, v) for v in values]) for system in systems])
        for profile in MODELS
    ]
    return charts.panels(columns, **layout)


def _day_chart(evaluation: Systems) -> go.Figure:
    columns = []
    for profile in MODELS:
        days = {system.name: evaluation.day(profile, system) for system in (MONOLITH, OURS)}
        lines = [_line(name, range(len(day.gpus)), day.gpus) for name, day in days.items()]
        encoders = days[OURS.name].image_gpus
        lines.append(charts.line("of ours, encoders", range(len(encoders)), encoders, COLOURS[ROUTED.name]))
        columns.append((profile.name, lines))
    return charts.panels(columns, x="minutes", y="GPUs")


def _line(name: str, x: Iterable[float], y: Iterable[float]) -> go.Scatter:
    return charts.line(name, x, y, COLOURS[name], bold=name == OURS.name)


def main() -> int:
    """Simulate every cell, write the page; 0 if every threshold holds."""
    parser = paper_parser("modserve", __doc__, "another trace: requests of each minute in its last column")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    trace = find_trace(options.trace, options.data / TRACE, "minutes are made up")
    known = options.data / HOURS
    split = read_hours(known) if options.trace is None and trace is not None and known.exists() else None
    hours = read_day(trace, split, DAY_MINUTES, options.seed)
    evaluation = Systems(run_cells(partial(measure, options.seed, hours), cells(), options.processes))
    label = "made up" if trace is None else trace.name
    print_table(COLUMNS, table_rows(evaluation))
    report = judge(evaluation, label)
    build_page(evaluation, report, label).write(options.out / "modserve.html")
    return report.finish()
