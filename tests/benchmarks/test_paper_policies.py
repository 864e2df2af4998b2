"""Baseline policies of the papers: each decides as its paper says, and is registered beside the product's."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest

from benchmarks.papers.policies import otas, policies_in_child_processes
from benchmarks.papers.policies.baselines import decide_infaas, decide_pets, fixed
from tests.builders import a_pipeline
from tests.router.test_option_cache import LARGE_QUEUES, points_of
from tests.router.test_option_cache import a_view as a_queue_view
from tests.router.test_queue import whole
from tests.router.token_queues import POINTS, a_view, a_work
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_router.scheduling.policies import POLICIES, register
from trimtab_router.scheduling.policies.interface import Dispatch

FAST, SOME, ALL, BEST = "few", "some", "all", "more"
BY_SPEED = sorted(POINTS, key=lambda point: point.seconds(32))


def sizes(works):
    return [batch.rows for batch in otas.batched(a_view(works))]


def left(policy, view):
    found = policy(view)
    assert isinstance(found, Dispatch)
    return found.point.name, [row_slice.request for row_slice in found.row_slices]


@pytest.mark.parametrize(
    ("second", "batches"),
    [
        ({"deadline": 1.4, "at": 0.4}, [2]),
        ({"deadline": 1.4, "at": 0.6}, [1, 1]),
        ({"deadline": 1.7, "at": 0.4}, [1, 1]),
        ({"deadline": 1.4, "utility": 0.3}, [2]),
        ({"deadline": 1.4, "utility": 0.1}, [1, 1]),
        ({"deadline": 1.4, "rows": 32}, [1, 32]),
    ],
    ids=["near", "came later", "later deadline", "less utility", "far less", "no room"],
)
def test_query_joins_the_newest_similar_batch(second, batches):
    assert sizes([a_work(1.0), a_work(**second)]) == batches


def test_batch_search_ends_at_the_first_old_batch():
    """The newest is full of another utility; the one before it would do, and came in time."""
    first, other, last = a_work(1.0), a_work(1.0, utility=0.1, at=0.1), a_work(1.0, at=0.2)

    assert sizes([first, other, last]) == [2, 1]
    assert sizes([first, other, a_work(1.0, at=0.55)]) == [1, 1, 1] or sizes([first, other]) == [1, 1]


@pytest.mark.parametrize(("rps", "point"), [(100.0, BEST), (290.0, ALL), (380.0, SOME), (5000.0, FAST)])
def test_few_batches_get_the_point_of_the_arrival_rate(rps, point):
    works = [a_work(1.0, utility=0.5)]

    assert left(otas.decide, a_view(works, arrivals_rps=rps))[0] == point


def test_high_utility_gets_best_point_and_late_batch_fastest():
    assert left(otas.decide, a_view([a_work(1.0, utility=0.9)], arrivals_rps=5000.0))[0] == BEST
    assert left(otas.decide, a_view([a_work(0.002, utility=0.5)], arrivals_rps=1.0))[0] == FAST


def test_unplaced_batch_is_traced_to_the_first_point():
    """Nothing can be in time before the last batch: the paper's S begins with 1, not with 0."""
    works = [a_work(deadline, rows=32, utility=1.0) for deadline in (0.001, 0.002, 0.003, 0.004, 0.005, 1.0)]
    view = a_view(works)
    points = otas.by_printed_program(view, BY_SPEED, otas.batched(view), 0.0)

    assert points[0] is not None
    assert points[0].name == FAST


def test_pets_serves_in_order_of_arrival():
    early = [a_work(9.0, utility=0.01, at=0.0) for _ in range(32)]
    late = [a_work(0.5, utility=1.0, at=0.1, task="birds") for _ in range(32)]

    assert left(decide_pets, a_view([*late, *early])) == (BEST, early)


@pytest.mark.parametrize(
    ("rps", "loaded", "point"),
    [
        (100.0, "", BEST),
        (300.0, BEST, BEST),
        (320.0, BEST, ALL),
        (300.0, ALL, ALL),
        (100.0, ALL, BEST),
        (9000.0, BEST, FAST),
    ],
)
def test_infaas_keeps_the_loaded_model_while_it_carries_load(rps, loaded, point):
    view = a_view([a_work(1.0)], arrivals_rps=rps, loaded=loaded)

    assert left(decide_infaas, view)[0] == point


def test_fixed_policy_uses_its_point_alone():
    works = [a_work(0.05) for _ in range(60)]

    assert left(fixed(ALL).decide, a_view(works))[0] == ALL


BASELINES = ("Mosel", "AllModalities", "Aggressive", "Random", "Otas", "PetsLike", "InfaasLike")


@pytest.mark.parametrize("jobs", LARGE_QUEUES.values(), ids=LARGE_QUEUES)
@pytest.mark.parametrize("name", BASELINES)
def test_batch_above_the_split_limit_leaves_by_every_baseline(name, jobs):
    view = replace(a_queue_view(*map(whole, jobs)), points=list(points_of(130)), max_batch_rows=130)

    dispatch = POLICIES[name].decide(view)

    assert isinstance(dispatch, Dispatch)
    assert 1 <= sum(row_slice.rows for row_slice in dispatch.row_slices) <= 130


@pytest.mark.parametrize("name", BASELINES)
def test_registered_policy_is_valid_but_not_in_the_schema(name):
    spec = a_pipeline(schedulingPolicy=name).spec

    assert spec.policy_traits.uses_fallbacks is POLICIES[name].uses_fallbacks
    assert f'"{name}"' not in json.dumps(InferencePipelineSpec.model_json_schema()["properties"]["schedulingPolicy"])


def test_product_policies_cannot_be_replaced():
    with pytest.raises(ValueError, match="SlackFit"):
        register("SlackFit", POLICIES["Mosel"])


@pytest.mark.parametrize("registered", [True, False])
def test_child_process_needs_policy_modules_for_baselines(registered, tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text(a_pipeline(schedulingPolicy="Otas").model_dump_json(by_alias=True))
    code = "import sys, pathlib, trimtab_pipelines.documents as d; d.load_pipeline(pathlib.Path(sys.argv[1]))"
    with policies_in_child_processes() if registered else nullcontext():
        child = subprocess.run(
            [sys.executable, "-P", "-c", code, str(file)], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    assert (child.returncode == 0) is registered, child.stderr
    assert registered or "unknown scheduling policy 'Otas'" in child.stderr
