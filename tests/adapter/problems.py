"""Random small problems, and the slow obvious solver that is the oracle of the fast one."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_variant
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.solvers import exact
from trimtab_adapter.solvers.program import Option, Program, Solution, StageOptions, Weights, models
from trimtab_adapter.solvers.program_arrays import to_arrays

CHAINS = {n: tuple((k - 1,) if k else () for k in range(n)) for n in range(1, 5)}
FLAVORS = ("small", "large")
KINDS = {"t4": (4.0, 0.35), "l4": (8.0, 0.7), "a100": (25.0, 3.0), "h100": (50.0, 6.0)}
"""Speed over that of a core, and price an hour of a device, by flavor."""
GRAPHS = {
    1: (CHAINS[1],),
    2: (CHAINS[2], ((), ())),
    3: (CHAINS[3], ((), (0,), (0,)), ((), (), (0, 1))),
    4: (
        CHAINS[4],
        ((), (), (), (0, 1, 2)),
        ((), (0,), (0,), (0, 1, 2)),
        ((), (0,), (0,), (1, 2)),
        ((), (0,), (1,), (0, 2)),
        ((), (), (0,), (0, 1)),
        ((), (0,), (0,), (2,)),
    ),
}
WEIGHTS = (Weights(10.0, 0.5, 1e-6), Weights(10.0, 1e-5, 1e-8), Weights(1e-6, 1.0, 1e-9), Weights(200.0, 1.0, 0.01))


def a_program(seed: int) -> Program:
    """A random problem: chain or DAG, any goal, with and without binding budgets, flavors, floors and penalties."""
    rng = np.random.default_rng(seed)
    graphs = GRAPHS[int(rng.integers(1, 5))]
    graph = graphs[int(rng.integers(len(graphs)))]
    stages = tuple(
        StageOptions(f"s{k}", predecessors, _options(rng, int(rng.integers(1, 8))))
        for k, predecessors in enumerate(graph)
    )
    most_cores, most_cost = (
        sum(max(getattr(option, name) for option in stage.options) for stage in stages) for name in ("cores", "cost")
    )
    limits = {name: float(rng.integers(1, 5)) for name in FLAVORS if rng.random() < 0.5}
    return Program(
        stages=stages,
        slo_seconds=float(rng.uniform(0.05, 0.25) * len(stages)),
        cores=most_cores * float(rng.uniform(0.2, 1.2)),
        gpus=int(rng.integers(0, 7)),
        metric=("Product", "NormalizedRanks")[int(rng.integers(2))],
        weights=WEIGHTS[int(rng.integers(len(WEIGHTS)))],
        accuracy_floor=float(rng.choice([0.0, 0.0, 0.3, 0.5])),
        cost=most_cost * float(rng.uniform(0.3, 1.2)) if rng.random() < 0.5 else math.inf,
        flavors=tuple(limits.items()),
    )


def _options(rng: np.random.Generator, count: int) -> tuple[Option, ...]:
    return tuple(
        Option(
            variant=f"v{n % 3}",
            operating_point="default",
            batch_size=int(2 ** rng.integers(0, 6)),
            replicas=int(rng.integers(1, 5)),
            cores=float(rng.integers(1, 17)) / 2,
            gpus=(gpus := int(rng.choice([0, 0, 1, 2]))),
            cost=float(rng.uniform(0.1, 4.0)) + 5.0 * gpus,
            flavors=_devices(rng, gpus),
            accuracy=(accuracy := float(rng.choice([0.0, 0.5, 0.7, 0.9, 1.0]))),
            value=accuracy,
            latency_seconds=float(rng.uniform(0.01, 0.3)),
            throughput_rps=100.0,
            penalty=float(rng.choice([0.0, 0.05, 1.0])),
        )
        for n in range(count)
    )


def _devices(rng: np.random.Generator, gpus: int) -> dict[str, float]:
    """Devices of one flavor, or of both in two replica groups."""
    first = int(rng.integers(0, gpus + 1))
    return dict(zip(FLAVORS, (float(first), float(gpus - first)), strict=True))


def a_large_program(
    seed: int, stages: int = 10, variants: int = 10, cores: float = 1e9, slo_share: float | None = None
) -> Program:
    """A chain of profiled variants at seven batch sizes, α/β from 20 to 2000, as IPA's scaling figure has.

    `slo_share` is of IPA's SLO, five times the mean latency at batch 1; a tenth to the whole where none is given.
    """
    rng = np.random.default_rng(seed)
    load_rps, slo_seconds = float(rng.uniform(5, 50)), 0.0
    drawn_share = float(rng.uniform(0.1, 1.0))
    share = drawn_share if slo_share is None else slo_share
    chain = []
    for k in range(stages):
        accuracies = np.sort(rng.uniform(0.5, 0.99, variants))
        seconds = np.sort(rng.uniform(0.005, 0.2, variants))
        cores_each = np.sort(rng.integers(1, 9, variants))
        slo_seconds += 5 * float(seconds.mean()) * share
        options = []
        for v, batch in itertools.product(range(variants), (1, 2, 4, 8, 16, 32, 64)):
            service = float(seconds[v] * (0.3 + 0.7 * batch * rng.uniform(0.8, 1.0)))
            replicas = math.ceil(load_rps * service / batch)
            latency = service + (batch - 1) / load_rps
            accuracy = float(accuracies[v])
            cost = float(replicas * cores_each[v])
            model = (f"v{v}", "default", batch, replicas, cost, 0, cost, accuracy, accuracy)
            options.append(Option(*model, latency_seconds=latency, throughput_rps=replicas * batch / service))
        chain.append(StageOptions(f"s{k}", (k - 1,) if k else (), tuple(options)))
    ratio = float(np.exp(rng.uniform(np.log(20), np.log(2000))))
    return Program(tuple(chain), slo_seconds, cores, 0, "Product", Weights(ratio, 1.0, 1e-6))


def with_accelerators(program: Program, gpus: int) -> Program:
    """A program in which each option may sit on GPUs too: six times as fast there, with one core a replica."""

    def on_gpus(option: Option) -> Option:
        return option._replace(
            latency_seconds=option.latency_seconds / 6,
            cores=float(option.replicas),
            gpus=max(1, option.replicas // 6),
            cost=float(option.replicas),
        )

    stages = tuple(replace(stage, options=(*stage.options, *map(on_gpus, stage.options))) for stage in program.stages)
    return replace(program, stages=stages, gpus=gpus)


def a_large_graph(seed: int, stages: int = 8) -> Program:
    """A random DAG too large for brute force: each stage waits for up to two earlier ones."""
    rng = np.random.default_rng(seed)
    waits_for = [tuple(sorted({int(n) for n in rng.integers(0, k, 2)})) if k else () for k in range(stages)]
    listed = tuple(StageOptions(f"s{k}", before, _options(rng, 8)) for k, before in enumerate(waits_for))
    cores = sum(max(option.cores for option in stage.options) for stage in listed) * float(rng.uniform(0.3, 1.0))
    weights = WEIGHTS[int(rng.integers(len(WEIGHTS)))]
    metric = ("Product", "NormalizedRanks")[int(rng.integers(2))]
    return Program(listed, float(rng.uniform(0.4, 1.2)), cores, int(rng.integers(2, 9)), metric, weights)


def a_hosting_problem(
    seed: int, stages: int = 4, variants: int = 5, sizes: Sequence[int] = (), *, grouped: bool = False, flavors: int = 0
) -> PlanningProblem:
    """Stages whose replicas host all variants, each with an escalation to every more accurate one; mixes are free.

    `grouped`: the heaviest variant has replicas of its own. `flavors`: every variant also exists on so many kinds of
    GPUs, in replica groups of their own, some with limits, and there may be a budget of money.
    """
    rng = np.random.default_rng(seed)
    chain, profiles = a_chain(stages), {}
    for stage in chain:
        accuracies = np.sort(rng.uniform(0.7, 0.99, variants)).tolist()
        seconds = np.sort(np.exp(rng.uniform(np.log(0.0005), np.log(0.02), variants))).tolist()
        outputs = [*stage["outputs"], {"name": "sure", "datatype": "FP32"}]
        stage.update({"confidence": "sure", "outputs": outputs}, **({"batchSizes": sizes} if sizes else {}))
        stage["variants"] = [
            a_variant(f"v{n}", accuracy=accuracy, escalations=_looks(rng, n, accuracies))
            for n, accuracy in enumerate(accuracies)
        ]
        if grouped:
            stage["variants"][-1]["resources"] = {"cpu": 2}
        points = [
            a_point_profile(f"v{n}", 0.001, row_seconds, 2.0 if grouped and n == variants - 1 else 1.0)
            for n, row_seconds in enumerate(seconds)
        ]
        for kind, (speed, _) in list(KINDS.items())[:flavors]:
            stage["variants"] += [
                a_variant(f"v{n}-{kind}", accuracy=accuracy, flavor=kind, resources={"cpu": 1, "gpu": 1})
                for n, accuracy in enumerate(accuracies)
            ]
            points += [a_point_profile(f"v{n}-{kind}", 0.001, s / speed, 1.0) for n, s in enumerate(seconds)]
        profiles[stage["name"]] = a_profile(stage["name"], points)
    objective: dict[str, object] = {
        "goal": str(rng.choice(["Weighted", "MaxAccuracy", *(["MinCost"] if flavors else [])])),
        "accuracyWeight": float(rng.choice([10.0, 100.0])),
        "accuracyMetric": str(rng.choice(["Product", "NormalizedRanks"])),
        "accuracyFloor": float(rng.choice([0.0, 0.6, 0.75])),
    }
    budget: dict[str, object] = {"cores": str(int(rng.integers(stages, 4 * stages)))}
    kinds: list[dict[str, object]] = []
    load_rps = float(rng.uniform(5.0, 150.0))
    if flavors:
        budget["gpus"] = int(rng.integers(0, 3 * stages))
        budget |= {"costPerHour": float(rng.uniform(0.5, 2.0)) * stages} if rng.random() < 0.5 else {}
        load_rps *= 3.0
        kinds = [{"name": "default", "prices": {"core": 0.04}}]
        for kind, (_, price) in list(KINDS.items())[:flavors]:
            limit = {"limit": int(rng.integers(0, 4))} if rng.random() < 0.5 else {}
            kinds.append({"name": kind, "prices": {"core": 0.04, "gib": 0.005, "device": price}, **limit})
    fields = {"objective": objective, "budget": budget, "flavors": kinds, "slo": {"latency": f"{100 * stages}ms"}}
    pipeline = a_pipeline(chain, schedulingPolicy="TokenAdaptive" if flavors else None, **fields)
    return PlanningProblem(pipeline.spec, profiles, load_rps)


def _looks(rng: np.random.Generator, first: int, accuracies: Sequence[float]) -> list[dict[str, object]]:
    return [
        {
            "to": "default",
            "variant": f"v{second}",
            "confidenceBelow": 0.6,
            "share": float(rng.uniform(0.05, 0.5)),
            "accuracy": float(rng.uniform(accuracies[first], min(accuracies[second] + 0.01, 1.0))),
        }
        for second in range(first + 1, len(accuracies))
    ]


def brute_force(program: Program) -> tuple[Option, ...] | None:
    """The best of all choices, or None where none is feasible."""
    choices = itertools.product(*(stage.options for stage in program.stages))
    feasible = [choice for choice in choices if program.is_feasible(choice)]
    return max(feasible, key=program.objective, default=None)


def search(program: Program, widths: Sequence[int] = exact.WIDTHS) -> Solution | None:
    """Solve by label setting alone, however few choices there are."""
    arrays = to_arrays(program)
    return None if arrays is None else exact.search(program, arrays, widths)


def second_best(program: Program, best: tuple[Option, ...]) -> Program:
    """The problem of the best plan that runs another model somewhere."""
    return replace(program, other_than=models(best))
