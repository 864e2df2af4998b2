"""A real transformer served by each method under the paper's loads, which are scaled to this machine.

Every method is asked the same queries at the same moments. Who has one point alone keeps to it. Afterwards each load is
simulated as it was served, from the profile of this machine.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.modalities.setting import slowed
from benchmarks.otas.beside import Beside, Served
from benchmarks.otas.cells import BURSTY, SYNTHETIC, Source
from benchmarks.otas.load import synthetic_rps
from benchmarks.otas.measured import Cell, of_simulated
from benchmarks.otas.methods import OTAS, OURS, PETS
from benchmarks.otas.paper import GAMMAS, PLAIN
from benchmarks.profiles import profiled
from benchmarks.tokens_served import driving
from benchmarks.tokens_served.direct import BATCH, Direct, mixed
from benchmarks.tokens_served.driving import CORES, SOURCE, STAGE, VARIANT, Serving, point_named, serving
from benchmarks.tokens_served.outcome import Run
from benchmarks.tokens_served.queries import QUERIES, Queries
from benchmarks.tokens_served.tasks import drawn
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.plan import PointPlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_router.request import RequestOptions
from trimtab_router.scheduling.policies.interface import DropPolicy

WARMING_SECONDS, TURNS, TURN_SECONDS = 1.0, 3, 2.0
"""Of batches at the plain point, before the first load: what the machine serves is their median."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Method:
    """A policy, and the only point it may choose where it has only one."""

    name: str
    policy: str
    point: str = ""
    drops: DropPolicy = "Predicted"


METHODS = (
    Method(OURS, "TokenAdaptive"),
    Method(OTAS, "Otas"),
    Method("ToMe, merge-32", "SlackFit", "merge-32"),
    Method("VPT, merge-40-prompts", "SlackFit", "merge-40-prompts"),
    Method("INFaaS-like, all loaded", "InfaasLike"),
    Method(PETS, "PetsLike", driving.PLAIN, "Never"),
)
"""This transformer's strongest merging before its accuracy falls off, and the more accurate of its points with prompts:
it has none that has prompts and merges nothing. INFaaS's models are loaded already."""


async def serve_all(source: Source, deadline_seconds: float, folder_of_profiles: Path, tell: Tell) -> Beside:
    """Serve all methods under both loads, as long as the source is; `tell` is told how far it is.

    Args:
        source: the bursty load, as the paper has it.
        deadline_seconds: what queries in a hurry have.
        folder_of_profiles: where they are, or will be.
        tell: takes lines.
    """
    queries, found = Queries(deadline_seconds), list[Served]()
    tell("profiling the transformer, unless that was done before")
    profiles = await profiled(SOURCE, folder_of_profiles, {STAGE: [VARIANT]})
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        capacity_rps = await _capacity_rps(Path(folder) / "capacity", profiles, queries)
        tell(f"the plain point serves {capacity_rps:.0f} queries a second here")
        paper_rps = {SYNTHETIC: synthetic_rps(source.seconds, seed=1), BURSTY: source.bursty_rps}
        rates = {workload: scale_of(capacity_rps) * each for workload, each in paper_rps.items()}
        conditions = Environment(service_ratios={(STAGE, VARIANT): _ratio(profiles, capacity_rps)})
        for number, method in enumerate(METHODS, 1):
            place = Path(folder) / str(number)
            async with serving(
                SOURCE, place, method.name, method.policy, profiles, queries, drops=method.drops
            ) as running:
                if method.point:
                    await running.keep_to(point_named(running.points, method.point), method.name)
                runs = {workload: await _offered(running, each) for workload, each in rates.items()}
            for workload, run in runs.items():
                scenario = _scenario(running, run, profiles, conditions)
                cell = Cell(workload, method.name)
                simulated = of_simulated(cell, simulate(scenario), run.utilities, STAGE)
                found.append(Served(cell, run, simulated))
                tell(f"{workload}, {method.name}: utility {run.utility:.1f} of {len(run.results.records)} queries")
            tell(f"{number} of {len(METHODS)} served")
    return Beside(found, capacity_rps, scale_of(capacity_rps), fastest_first(running.points))


def fastest_first(points: Sequence[PointPlan]) -> list[str]:
    """Their names, by the seconds of a full batch."""
    return [point.name for point in sorted(points, key=lambda point: point.service_seconds[BATCH])]


def scale_of(capacity_rps: float) -> float:
    """What the paper's rates are multiplied by, so that they are to this machine what they are to the paper's card."""
    return capacity_rps / next(option.rps for option in GAMMAS if option.name == PLAIN)


async def _capacity_rps(folder: Path, profiles: Mapping[str, ModelProfile], queries: Queries) -> float:
    """Queries a second of the plain transformer in full batches, past the router."""
    pixels = np.concatenate([queries.payload(index).inputs[0].array for index in range(BATCH)])
    async with (
        serving(SOURCE, folder, "", "SlackFit", profiles, queries) as running,
        aiohttp.ClientSession() as session,
    ):
        replica = Direct(session, running.replica_url, pixels)
        await replica.rows_per_second(drawn(1), mixed, driving.PLAIN, WARMING_SECONDS)
        turns = [await replica.rows_per_second(drawn(1), mixed, driving.PLAIN, TURN_SECONDS) for _ in range(TURNS)]
    return statistics.median(turns)


async def _offered(running: Serving, rates: NDArray[np.float64]) -> Run:
    """Offer a load that has these rates, one a second."""
    return await replace(running, shape=rates).offer(float(rates.mean()), rates.size)


def _ratio(profiles: Mapping[str, ModelProfile], capacity_rps: float) -> float:
    """How much longer the plain point takes here than its profile says of so much of a core."""
    known = profiles[STAGE].spec.point(VARIANT, driving.PLAIN, 1.0)
    if known is None:
        raise RuntimeError(f"{STAGE}: point {driving.PLAIN} of {VARIANT} was not measured; profile it again")
    return BATCH / capacity_rps / (known.latency_seconds(BATCH, 0.5) / CORES)


def _scenario(running: Serving, run: Run, profiles: Mapping[str, ModelProfile], conditions: Environment) -> Scenario:
    """The same queries at the same moments, for the simulator."""
    kinds = [QUERIES[kind] for kind in running.kinds(run.results)]
    wishes = [
        RequestOptions(timeout_seconds=seconds, utility=kind.utility, task=kind.task)
        for kind, seconds in zip(kinds, run.deadlines.tolist(), strict=True)
    ]
    return Scenario(
        pipeline=running.pipeline,
        profiles=slowed(profiles, 1.0 / CORES),
        arrivals_seconds=run.results.records["scheduled"],
        duration_seconds=run.results.facts.duration_seconds,
        plan=running.plan,
        environment=conditions,
        options=tuple(wishes),
    )
