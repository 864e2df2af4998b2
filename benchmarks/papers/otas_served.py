"""OTAS's evaluation, served: a real transformer by each method under the paper's loads, scaled to this machine.

Each method gets the same queries at the same times; a method of one point is kept to it.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import benchmarks.papers.policies  # noqa: F401 - registers the baselines
from benchmarks.harness.grid import Cell
from benchmarks.harness.report import Page, Report, print_table
from benchmarks.harness.serving import Profiles, cached_profiles, plan_pinned, serve, slow_down, write_pipeline
from benchmarks.papers import otas_queries
from benchmarks.papers.otas_queries import (
    BURSTY,
    GAMMAS,
    OTAS,
    OURS,
    PETS,
    PLAIN,
    SYNTHETIC,
    QueryEvaluation,
    QueryRow,
    chart_types,
    method_key,
    point_shares,
    synthetic_rps,
)
from trimtab.options import console
from trimtab_loadtester.clients import RestClient
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_loadtester.results import Results
from trimtab_pipelines.accuracy_evidence import wilson_interval
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin
from trimtab_protocol import Tensor, event_loop
from trimtab_protocol.extensions import OPERATING_POINT, TASK, UTILITY
from trimtab_router.scheduling.policies.interface import DropPolicy
from trimtab_training.task_training import LabelledImages
from trimtab_training.vit_tasks.datasets import MAX_PER_TASK, SEED, TASKS

SOURCE = Path(__file__).parents[2] / "pipelines" / "vit-tasks"
STAGE, VARIANT, BATCH, PLAIN_POINT = "classify", "vit-fine", 8, "full"
CORES = 0.5
"""The replica's limit, so that router, Envoy and load generator have enough."""
WARM_SECONDS, TURNS, TURN_SECONDS = 1.0, 3, 2.0
"""Of batches at the plain point before the first load: the machine's capacity is the median of the turns."""
RESAMPLES = 400
MIN_QUERIES = 500


IMAGE_TASKS = {"cifar10": "digits", "cifar100": "crops", "eurosat": "faces"}
"""By the paper's. The task of most utility is the one that the transformer was trained on first."""
QUERIES = [replace(query, task=IMAGE_TASKS[query.task]) for query in otas_queries.QUERIES]
SHORTEST_SECONDS = min(query.seconds for query in QUERIES)
TASK_NUMBERS = {task: number for number, task in enumerate(TASKS)}


@dataclass(frozen=True, slots=True)
class Method:
    """A policy, and its only point if it has one."""

    name: str
    policy: str
    point: str | None = None
    drop_policy: DropPolicy = "Predicted"


METHODS = (
    Method(OURS, "TokenAdaptive"),
    Method(OTAS, "Otas"),
    Method("ToMe, merge-32", "SlackFit", "merge-32"),
    Method("VPT, merge-40-prompts", "SlackFit", "merge-40-prompts"),
    Method("INFaaS-like, all loaded", "InfaasLike"),
    Method(PETS, "PetsLike", PLAIN_POINT, "Never"),
)
"""ToMe: this transformer's strongest merging before its accuracy falls off. VPT: the more accurate of its points with
prompts; it has none with prompts alone. INFaaS's models are loaded already."""


class Queries:
    """Payloads of queries: held-out images with types of equal probability.

    `deadline_seconds`: the shortest deadline.
    """

    def __init__(self, deadline_seconds: float, seed: int = 0) -> None:
        self._deadline_seconds = deadline_seconds
        self._seed = seed
        self._images: dict[str, LabelledImages] = {
            task: TASKS[task]("held-out", MAX_PER_TASK, SEED) for task in {query.task for query in QUERIES}
        }

    def kind(self, index: int) -> int:
        """Return the type of a query, an index of QUERIES."""
        return int(np.random.default_rng([self._seed, index]).integers(len(QUERIES)))

    def deadline(self, kind: int) -> float:
        return self._deadline_seconds * QUERIES[kind].seconds / SHORTEST_SECONDS

    def payload(self, index: int) -> Payload:
        kind = self.kind(index)
        query = QUERIES[kind]
        images = self._images[query.task]
        row = int(np.random.default_rng([self._seed, index, 1]).integers(len(images)))
        inputs = (
            Tensor.of("image", images.pixels[row : row + 1].numpy()),
            Tensor.of("task", np.array([TASK_NUMBERS[query.task]], np.int64)),
        )
        timeout = round(1e6 * self.deadline(kind))
        return Payload(inputs, int(images.labels[row]), {"timeout": timeout, TASK: query.task, UTILITY: query.utility})

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Compare the label; KeyError if the response has none."""
        return Score(int(int(outputs["label"].reshape(-1)[0]) == truth), 1)


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """A load that a method served."""

    cell: Cell
    results: Results
    """A record a query, in the order in which they were due."""
    deadlines: NDArray[np.float64]
    """Seconds of each, [N]."""
    utilities: NDArray[np.float64]
    """Of each, [N]."""

    @property
    def in_time(self) -> NDArray[np.bool_]:
        """Which queries have a response by their deadline, [N]."""
        records = self.results.records
        in_time: NDArray[np.bool_] = (records["total"] > 0) & (records["latency_seconds"] <= self.deadlines)
        return in_time

    @property
    def gained(self) -> NDArray[np.float64]:
        """Utility of each query that was right in time, by its label, [N]."""
        gained: NDArray[np.float64] = self.utilities * (self.in_time & (self.results.records["correct"] > 0))
        return gained

    @property
    def expected_utility(self) -> float:
        """Utility of queries in time by the accuracy of the responses, without the luck of single images."""
        expected = np.nan_to_num(self.results.records["expected_accuracy"])
        return float((self.utilities * expected)[self.in_time].sum())

    @property
    def types(self) -> tuple[float, float, float, float]:
        """Shares of all queries: right in time, wrong in time, late, without a response."""
        records, in_time, n = self.results.records, self.in_time, max(len(self.results.records), 1)
        answered, right = records["total"] > 0, records["correct"] > 0
        counts = (in_time & right, in_time & ~right, answered & ~in_time, ~answered)
        first, second, third, fourth = (int(which.sum()) / n for which in counts)
        return first, second, third, fourth

    @property
    def row(self) -> QueryRow:
        records = self.results.records
        points = [str(point) for point in records[f"operating_point:{STAGE}"]]
        return QueryRow(
            cell=self.cell,
            queries=len(records),
            utility=float(self.gained.sum()),
            types=self.types,
            points=point_shares(points),
        )

    def utility_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the utility (bootstrap over queries)."""
        gained, rng = self.gained, np.random.default_rng(0)
        sums = [float(rng.choice(gained, gained.size).sum()) for _ in range(RESAMPLES)]
        low, high = np.quantile(sums, (0.025, 0.975))
        return float(low), float(high)

    def accuracy(self) -> tuple[float, float, float]:
        """Return the measured accuracy of all responses with its 95 % interval."""
        answered = self.results.answered
        right, total = int(answered["correct"].sum()), int(answered["total"].sum())
        return (right / total, *wilson_interval(right, total)) if total else (float("nan"),) * 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that was served."""

    loads: Sequence[ServedLoad]
    """Each workload by each method."""
    capacity_rps: float
    """Queries a second of the plain point on this machine."""
    scale: float
    """What the paper's rates were multiplied by."""

    @property
    def evaluation(self) -> QueryEvaluation:
        return QueryEvaluation(load.row for load in self.loads)

    @property
    def methods(self) -> list[str]:
        """Methods that were served, ours first."""
        return list(dict.fromkeys(load.cell.method for load in self.loads))


def serve_all(bursty: NDArray[np.float64], deadline_seconds: float, profiles_folder: Path) -> Comparison:
    """Serve all methods under both loads; `bursty` has the paper's rate of each second."""
    return event_loop.run(_serve_all(bursty, deadline_seconds, profiles_folder))


async def _serve_all(bursty: NDArray[np.float64], deadline_seconds: float, profiles_folder: Path) -> Comparison:
    queries, loads = Queries(deadline_seconds), list[ServedLoad]()
    console.print("profiling the transformer, unless an earlier run did")
    profiles = slow_down(await cached_profiles(SOURCE, profiles_folder, {STAGE: [VARIANT]}), 1.0 / CORES)
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        bench = Bench(Path(folder), profiles, queries)
        capacity_rps = await bench.measure_capacity()
        console.print(f"the plain point serves {capacity_rps:.0f} queries a second here")
        # This machine's rates over those of the paper's GPU.
        scale = capacity_rps / next(option.rps for option in GAMMAS if option.name == PLAIN)
        rates = {SYNTHETIC: scale * synthetic_rps(bursty.size, seed=1), BURSTY: scale * bursty}
        for number, method in enumerate(METHODS, 1):
            loads += await bench.serve(method, rates)
            console.print(f"{method.name}: {number} of {len(METHODS)} served")
        loads.sort(key=lambda load: load.cell.case == (BURSTY,))
    return Comparison(loads, capacity_rps, scale)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all methods share; `profiles` are those of a replica with its share of a core."""

    folder: Path
    profiles: Profiles
    queries: Queries

    def write(self, method: Method) -> tuple[Path, InferencePipeline]:
        """Write the pipeline that a method serves."""
        folder = self.folder / method_key(method.name)
        longest_seconds = max(self.queries.deadline(kind) for kind in range(len(QUERIES)))
        pipeline = write_pipeline(
            SOURCE,
            folder,
            schedulingPolicy=method.policy,
            dropPolicy=method.drop_policy,
            slo={"latency": f"{1000 * longest_seconds:g}ms"},
            queue={"maxRows": 4096},
        )
        return folder, pipeline

    def plan(self, method: Method, pipeline: InferencePipeline) -> PipelinePlan:
        """Plan one replica with every useful point, or with the method's only point."""
        pin = Pin(variant=VARIANT, replicas=1, batch_size=BATCH, operating_point=method.point)
        return plan_pinned(pipeline, self.profiles, {STAGE: pin}, rps=1.0)

    async def measure_capacity(self) -> float:
        """Return queries a second of the plain transformer in full batches, past the router."""
        method = Method("capacity", "SlackFit")
        folder, pipeline = self.write(method)
        pixels = np.concatenate([self.queries.payload(index).inputs[0].array for index in range(BATCH)])
        async with (
            serve(folder, pipeline, self.plan(method, pipeline), CORES) as served,
            RestClient(served.replica_address(STAGE), VARIANT) as client,
        ):
            await rows_per_second(client, pixels, WARM_SECONDS)
            return statistics.median([await rows_per_second(client, pixels, TURN_SECONDS) for _ in range(TURNS)])

    async def serve(self, method: Method, rates: Mapping[str, NDArray[np.float64]]) -> list[ServedLoad]:
        """Serve a method under loads with these rates, one a second."""
        folder, pipeline = self.write(method)
        loads = []
        async with serve(folder, pipeline, self.plan(method, pipeline), CORES) as served:
            for workload, rps in rates.items():
                load = LoadSpec.from_counts(rps, f"{rps.mean():.0f} queries a second")
                results = await served.attack(load, float(rps.size), self.queries)
                loads.append(self._served_load(Cell((workload,), method.name), results))
        return loads

    def _served_load(self, cell: Cell, results: Results) -> ServedLoad:
        kinds = [self.queries.kind(i % results.facts.distinct_payloads) for i in range(len(results.records))]
        deadlines = np.array([self.queries.deadline(kind) for kind in kinds])
        return ServedLoad(cell, results, deadlines, np.array([QUERIES[kind].utility for kind in kinds]))


async def rows_per_second(client: RestClient, pixels: NDArray[np.uint8], seconds: float) -> float:
    """Return the rows a second of full batches that a replica serves one after another at the plain point."""
    inputs = (Tensor.of("image", pixels), Tensor.of("task", np.zeros(len(pixels), np.int64)))
    body = client.encode(inputs, (), {OPERATING_POINT: PLAIN_POINT, "binary_data_output": True})
    served, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        response = await client.send(body)
        if response.message is None:
            raise RuntimeError(f"the replica responded {response.code}: {response.detail}")
        served += len(pixels)
    return served / (now - began)


def judge(comparison: Comparison, report: Report) -> None:
    """Add what was served to a report, with the thresholds of the simulation."""
    evaluation = comparison.evaluation
    report.add({"served_plain_rps": comparison.capacity_rps, "served_times_the_papers_load": comparison.scale})
    for load in comparison.loads:
        (workload,), method = load.cell.case, load.cell.method
        key = f"served_{workload}_{method_key(method)}"
        low, high = load.utility_interval()
        report.add(
            {
                f"{key}_queries": load.row.queries,
                f"{key}_utility": load.row.utility,
                f"{key}_utility_95": f"{low:.1f}–{high:.1f}",
                f"{key}_utility_by_promise": load.expected_utility,
                **{f"{key}_type_{number}": share for number, share in enumerate(load.types, 1)},
            }
        )
        if method != OURS:
            report.add({f"served_{workload}_gain_over_{method_key(method)}": evaluation.gain(workload, method)})
    rivals = [method for method in comparison.methods if method not in {OURS, OTAS}]
    for name, compared in (("OTAS as printed", [OTAS]), ("the other methods", rivals)):
        gains = [100 * evaluation.gain(workload, rival) for workload in evaluation.workloads for rival in compared]
        report.hold(f"served: utility over {name} in any load, least, %", min(gains), ">=", 1e-9)
    fewest = min(load.row.queries for load in comparison.loads)
    report.hold("served: queries by each method, least", fewest, ">=", MIN_QUERIES)
    print_table(COLUMNS, table_rows(comparison), "served")


TYPES = ("type 1", "type 2", "type 3", "type 4")
COLUMNS = ("load", "method", "queries", "utility (95 %)", "by promise", "ours beside it", *TYPES, "accuracy (95 %)")
NOTE = (
    "Each method gets the same queries, one method after the other. INFaaS's models are points of one transformer, "
    "loaded already; fixed prompts are those of a point that merges too. PetS drops no query."
)


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for each load and method."""
    evaluation = comparison.evaluation
    return [_table_row(load, evaluation) for load in comparison.loads]


def _table_row(load: ServedLoad, evaluation: QueryEvaluation) -> tuple[str, ...]:
    (workload,), method = load.cell.case, load.cell.method
    (low_utility, high_utility), (accuracy, low, high) = load.utility_interval(), load.accuracy()
    return (
        workload,
        method,
        str(load.row.queries),
        f"{load.row.utility:.1f} ({low_utility:.0f}–{high_utility:.0f})",
        f"{load.expected_utility:.1f}",
        f"{100 * evaluation.gain(workload, method):+.1f} %" if method != OURS else "",
        *(f"{100 * share:.2f} %" for share in load.types),
        f"{accuracy:.3f} ({low:.3f}–{high:.3f})",
    )


def add_sections(page: Page, comparison: Comparison) -> None:
    """Add what a real transformer did on this machine to the page."""
    evaluation = comparison.evaluation
    page.add_chart(
        "Served: what became of the queries",
        f"vit-tasks' finer transformer, whose plain point serves {comparison.capacity_rps:.0f} queries a second here, "
        f"so the paper's loads times {comparison.scale:.3f}. The same four types, by labels.",
        chart_types(evaluation, comparison.methods),
    )
    page.add_table("Served: all figures", NOTE, COLUMNS, table_rows(comparison), range(2, len(COLUMNS)))
