"""Mélange's published cases in our integer program: two kinds of GPUs by request size, and then also two models.

Mélange (Griggs et al. 2024) gives each class of request sizes to one kind of GPU, so that the rent of whole GPUs is
least. Here each class is a stage whose options take a share of the GPUs of one kind; the GPUs are the cheapest numbers
for which the program has a solution. HiGHS solves Mélange's own program for comparison.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.harness.report import Report, print_table
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import Option, Program, Solution, StageOptions, Weights

Floats = NDArray[np.float64]
PRICES: Mapping[str, float] = {"A10G": 1.01, "A100-80GB": 3.67}
"""Dollars an hour, of the paper."""
EDGES = (25, 100, 250, 500, 1000)
"""Upper ends of the classes of input and of output tokens; the last class has none."""
LLAMA_2_7B: Mapping[str, Sequence[Sequence[float]]] = {
    "A10G": (
        (33.96, 12.35, 3.98, 1.46, 0.44, 0.13),
        (25.49, 7.85, 2.99, 1.12, 0.39, 0.11),
        (11.47, 5.5, 2.15, 0.86, 0.32, 0.11),
        (6.16, 2.62, 1.32, 0.6, 0.26, 0.11),
        (3.1, 1.51, 0.77, 0.38, 0.17, 0.07),
        (1.61, 0.81, 0.42, 0.22, 0.11, 0.04),
    ),
    "A100-80GB": (
        (46.7, 21.65, 10.38, 4.68, 1.7, 0.51),
        (44.48, 21.41, 9.77, 3.97, 1.57, 0.45),
        (33.7, 17.13, 7.58, 3.29, 1.28, 0.52),
        (18.59, 9.19, 4.74, 2.42, 1.04, 0.47),
        (9.85, 5.56, 3.01, 1.62, 0.73, 0.3),
        (5.22, 3.08, 1.72, 0.97, 0.48, 0.2),
    ),
}
"""Requests per second of one GPU, by class of input and of output tokens, of a public load balancer for Mélange."""
EXAMPLE: Mapping[str, Sequence[Sequence[float]]] = {"A10G": ((5, 1), (10, 5)), "A100-80GB": ((20, 2), (50, 20))}
"""The example of Mélange's repository, its shares of the classes and its load."""
EXAMPLE_SHARES, EXAMPLE_RPS = ((0.25, 0.125), (0.375, 0.25)), 16.0
TRACES = {"chats": "azure_llm_conv.csv.gz", "code": "azure_llm_code.csv.gz"}
LOADS_RPS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
LIGHTER_SPEED, LIGHTER_ACCURACY = 2.0, 0.9
"""Assumed: a lighter model, its throughput and accuracy relative to the published one's."""
SOLVE_SECONDS = 0.3
"""For one rent, of which most have no solution; one that is found too late costs the next rent."""
FLOORS = (1.0, 0.95)
COLUMNS = ("case", "requests/s", "Mélange, $/h", "ours, $/h", *(f"accuracy ≥ {floor:g}, $/h" for floor in FLOORS[1:]))


@dataclass(frozen=True, slots=True)
class Case:
    """Classes of requests with a load; arrays of shape [classes, kinds of GPU]."""

    name: str
    load_rps: float
    shares: Floats
    """Of the requests, of shape [classes]."""
    gpus: Floats
    """GPUs of each kind that would serve a class alone."""

    @classmethod
    def of(
        cls, name: str, load_rps: float, shares: Floats, throughput: Mapping[str, Sequence[Sequence[float]]]
    ) -> "Case":
        rps = np.array([throughput[kind] for kind in PRICES]).reshape(len(PRICES), -1).T
        sent = shares.ravel() > 0
        return cls(name, load_rps, shares.ravel()[sent], load_rps * shares.ravel()[sent, None] / rps[sent])


def melange_dollars(case: Case) -> float:
    """The least rent by Mélange's program: classes to kinds, and whole GPUs of each kind."""
    classes, kinds = case.gpus.shape
    each = np.kron(np.eye(classes), np.ones(kinds))  # every class has one kind
    used = np.hstack([np.diag(loads) for loads in case.gpus])
    constraints = [
        LinearConstraint(np.hstack([each, np.zeros((classes, kinds))]), 1, 1),
        LinearConstraint(np.hstack([used, -np.eye(kinds)]), -np.inf, 0),
    ]
    prices = np.array([*PRICES.values()])
    upper = np.concatenate([np.ones(classes * kinds), np.full(kinds, np.inf)])
    cost = np.concatenate([np.zeros(classes * kinds), prices])
    found = milp(cost, integrality=np.ones(cost.size), bounds=Bounds(0, upper), constraints=constraints)
    return float(found.fun)


def least_dollars(case: Case, floor: float) -> float:
    """The rent of the cheapest GPUs for which our program finds a solution of this accuracy."""
    return next(
        dollars
        for dollars, numbers in rents(case, 1.0 if floor == 1.0 else LIGHTER_SPEED)
        if solution(case, dict(zip(PRICES, numbers, strict=True)), floor) is not None
    )


def rents(case: Case, speed: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield numbers of GPUs with their rent, the cheapest first, that models of this speed may need."""
    prices = np.array([*PRICES.values()])
    least = (case.gpus * prices).min(axis=1).sum() / speed  # with parts of GPUs
    most = [range(math.ceil(total) + 1) for total in case.gpus.sum(axis=0)]
    found = sorted((float(np.dot(each, prices)), each) for each in itertools.product(*most))
    yield from ((dollars, each) for dollars, each in found if dollars >= least - 1e-9)


def solution(case: Case, numbers: Mapping[str, int], floor: float) -> Solution | None:
    """The most accurate choice of a kind and a model for each class within these GPUs."""
    count = len(case.shares)
    stages = tuple(
        StageOptions(f"class-{n}", (), [*options(case, n, count, lighter=floor < 1.0)]) for n in range(count)
    )
    limits = tuple((kind, float(number)) for kind, number in numbers.items())
    program = Program(stages, 1.0, 0.0, 0, "NormalizedRanks", Weights(1.0, 0.0, 0.0), floor, flavors=limits)
    return solve(program, SOLVE_SECONDS)


def options(case: Case, number: int, classes: int, *, lighter: bool) -> Iterator[Option]:
    models = {"published": (1.0, 1.0)} | ({"lighter": (LIGHTER_SPEED, LIGHTER_ACCURACY)} if lighter else {})
    for (model, (speed, accuracy)), (k, kind) in itertools.product(models.items(), enumerate(PRICES)):
        value = accuracy * float(case.shares[number]) * classes  # the metric is the mean over the stages
        used = {kind: float(case.gpus[number, k]) / speed}
        yield Option(kind, model, 1, 1, 0.0, 0, 0.0, accuracy, value, 0.0, case.load_rps, flavors=used)


def cases(data: Path) -> Iterator[Case]:
    yield Case.of("example", EXAMPLE_RPS, np.array(EXAMPLE_SHARES), EXAMPLE)
    for name, file in TRACES.items():
        tokens = np.loadtxt(data / file, delimiter=",", skiprows=1, usecols=(1, 2))
        classes = np.searchsorted(EDGES, tokens)
        shares = np.zeros((len(EDGES) + 1,) * 2)
        np.add.at(shares, tuple(classes.T), 1.0 / len(tokens))
        yield from (Case.of(name, load_rps, shares, LLAMA_2_7B) for load_rps in LOADS_RPS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks melange", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of traces")
    report, rows, ratios = Report("melange"), [], []
    for case in cases(parser.parse_args().data):
        melange, ours = melange_dollars(case), [least_dollars(case, floor) for floor in FLOORS]
        ratios.append(ours[0] / melange)
        rows.append((case.name, f"{case.load_rps:g}", f"{melange:.2f}", *(f"{dollars:.2f}" for dollars in ours)))
        named = dict(zip(("melange", *(f"accuracy_{floor:g}" for floor in FLOORS)), (melange, *ours), strict=True))
        report.add({f"{case.name}_{case.load_rps:g}_rps_{name}_dollars": value for name, value in named.items()})
    print_table(COLUMNS, rows, "rent of the GPUs")
    report.hold("rent over Mélange's, most", max(ratios), "<=", 1.01)
    return report.finish()
