"""Plans in money: prices, limits and budgets of resource flavors, alone and in two replica groups of a stage."""

import itertools

import numpy as np
import pytest

from tests.adapter.problems import a_hosting_problem, brute_force, search
from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_variant
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.program_builder import build_program
from trimtab_adapter.planning.relaxation import solve_or_relax
from trimtab_adapter.planning.spot import spot_note
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_adapter.solvers import exact
from trimtab_pipelines.documents import DocumentError, accept_plan, parse_pipeline
from trimtab_pipelines.flavors import ResourceFlavor
from trimtab_pipelines.request_outcome import OK

PRICES = {"old": 1.0, "new": 3.0}
POINTS = [a_point_profile("on-cpu", 0.002, 0.010), a_point_profile("on-old", 0.001, 0.004)]
PROFILES = {"stage-0": a_profile("stage-0", [*POINTS, a_point_profile("on-new", 0.001, 0.001)])}


def a_priced_pipeline(limits=None, **changes):
    """One model on a core, on an old GPU and on a new one that is four times as fast for three times the price."""
    chain = a_chain(1)
    devices = [a_variant(f"on-{kind}", accuracy=0.9, flavor=kind, resources={"cpu": 1, "gpu": 1}) for kind in PRICES]
    chain[0]["variants"] = [a_variant("on-cpu", accuracy=0.9), *devices]
    flavors = [
        {"name": kind, "prices": {"core": 0, "device": price}, **({"limit": limits[kind]} if limits else {})}
        for kind, price in PRICES.items()
    ]
    fields = {"schedulingPolicy": "TokenAdaptive", "flavors": flavors, "budget": {"cores": "16", "gpus": 8}}
    goal = {"objective": {"goal": "MinCost", "accuracyFloor": 0.9}}
    return a_pipeline(chain, **fields | goal | changes)


def plan_of(pipeline, load_rps):
    return initial_plan(pipeline, PROFILES, load_rps)


def described(pipeline, load_rps):
    return describe_option(plan_of(pipeline, load_rps).spec.stages[0])


def test_replicas_larger_than_a_node_are_not_planned() -> None:
    pipeline = a_priced_pipeline()
    roomy, small = ({"memory": f"{size}Gi"} for size in (64, 1))
    document = pipeline.model_dump(mode="json", by_alias=True)
    variants = {variant["name"]: variant for variant in document["spec"]["stages"][0]["variants"]}
    for kind, size in {"old": small, "new": roomy}.items():
        variants[f"on-{kind}"]["resources"]["memory"] = "2Gi"
        next(each for each in document["spec"]["flavors"] if each["name"] == kind).update(size)
    document["spec"]["stages"][0]["variants"] = [variants["on-old"], variants["on-new"]]

    assert plan_of(parse_pipeline(document, "p"), 10).spec.stages[0].variant == "on-new"
    for flavor in document["spec"]["flavors"]:
        flavor.update(small)
    message = "on-old need 2560 MiB, more than a node of flavor old has"
    with pytest.raises(PlanningError, match=message):
        plan_of(parse_pipeline(document, "p"), 10)


@pytest.mark.parametrize("goal", ["MinCost", "Weighted", "MaxAccuracy"])
@pytest.mark.parametrize("cores", [1.25, 4.0])
def test_cores_are_planned_before_gpus_of_equal_accuracy(goal, cores):
    chain = a_chain(1)
    sizes = {"on-cpu": {"cpu": cores}, "on-gpu": {"cpu": 1, "gpu": 8}}
    chain[0]["variants"] = [a_variant(name, resources=resources) for name, resources in sizes.items()]
    pipeline = a_pipeline(chain, budget={"cores": "8", "gpus": 8}, objective={"goal": goal, "accuracyFloor": 0.9})
    profile = a_profile("stage-0", [a_point_profile("on-cpu", cores=cores), a_point_profile("on-gpu")])
    spec = initial_plan(pipeline, {"stage-0": profile}).spec

    assert spec.stages[0].variant == "on-cpu"
    assert spec.expected
    assert (spec.expected.cores, spec.expected.cost_per_hour) == (cores, 0.0)


def test_cheapest_flavor_carries_the_load():
    pipeline = a_priced_pipeline()
    plan = plan_of(pipeline, 600.0)

    assert described(pipeline, 600.0) == "on-new ×1 batch 64"
    assert plan.spec.expected
    assert plan.spec.expected.cost_per_hour == 3.0
    assert plan.spec.expected.cost_by_flavor == {"new": 3.0}


def test_explanation_names_what_spot_saves_and_risks():
    pipeline = a_priced_pipeline({"old": 4, "new": 1}, budget={"cores": "8", "gpus": 8})
    flavors = [each.replace(spot=each.name == "old") for each in pipeline.spec.flavors]
    spec = pipeline.spec.replace(flavors=tuple(flavors))
    on_both, on_new = (solve_or_relax(PlanningProblem(spec, PROFILES, rps)) for rps in (1200.0, 600.0))

    assert spot_note(on_both, spec) == (
        "spot: 3 an hour of 6 (accuracy 0.9000); without spot no plan meets all constraints; "
        "replicas left if their nodes go: stage-0 1 of 4"
    )
    assert spot_note(on_new, spec) == ""


def test_two_flavors_serve_a_stage_if_the_better_is_limited():
    pipeline = a_priced_pipeline({"old": 4, "new": 1}, budget={"cores": "8", "gpus": 8})
    plan = plan_of(pipeline, 1200.0)
    (stage,) = plan.spec.stages
    groups = {group.variant: group.replicas for group in stage.groups}

    assert groups == {"on-new": 1, "on-old": 3}
    assert plan.spec.expected
    assert plan.spec.expected.cost_by_flavor == {"new": 3.0, "old": 3.0}
    assert stage.expected_accuracy == 0.9
    assert accept_plan(plan, pipeline) == plan
    with pytest.raises(DocumentError, match="at most 2 of flavor old"):
        accept_plan(plan, a_priced_pipeline({"old": 2, "new": 1}))


def test_equal_groups_serve_what_the_plan_promises():
    pipeline = a_priced_pipeline({"old": 4, "new": 1}, budget={"cores": "8", "gpus": 8})
    plan = plan_of(pipeline, 1200.0)
    arrivals = np.arange(10_000) / 1000.0
    result = simulate(Scenario(pipeline, PROFILES, arrivals, 10.0, plan))

    assert result.share(OK) == 1.0


@pytest.mark.parametrize(
    ("budget", "binding"),
    [
        ({"cores": "16", "gpus": 8, "costPerHour": 2}, "budget.costPerHour"),
        ({"cores": "2", "gpus": 0}, "budget.gpus"),
    ],
)
def test_binding_budget_is_named(budget, binding):
    pipeline = a_priced_pipeline(budget=budget, objective={"accuracyWeight": 100, "costWeight": 0.1})
    spec = plan_of(pipeline, 600.0).spec

    assert not spec.feasible
    assert spec.expected
    assert spec.expected.cost_per_hour <= 2.0 + 1e-9


def test_limit_that_binds_is_named():
    limited = a_priced_pipeline({"old": 8, "new": 0}, budget={"cores": "16", "gpus": 8})
    spec = plan_of(limited, 600.0).spec

    assert spec.explanation.binding_constraint.startswith("limit of flavor new: without it the objective would gain")


def test_unknown_flavor_is_named():
    pipeline = a_priced_pipeline()
    document = pipeline.model_dump(mode="json", by_alias=True, exclude={"spec": {"flavors"}})
    shared = [ResourceFlavor(name="old"), ResourceFlavor(name="new")]

    assert parse_pipeline(document, "pipeline", shared).spec.flavors == tuple(shared)
    with pytest.raises(DocumentError, match=r"variant on-new: there is no resource flavor 'new'; declared: old"):
        parse_pipeline(document, "pipeline", shared[:1])
    with pytest.raises(PlanningError, match="there is no resource flavor 'old'"):
        plan_of(pipeline.model_validate(document), 100.0)


def test_exact_solver_equals_brute_force_with_flavors():
    """Money, limits, and two groups of a stage: 1,000 problems."""
    grouped = priced = infeasible = 0
    for seed in range(1000):
        problem = a_hosting_problem(seed, stages=1 + seed % 2, variants=2, sizes=(1, 16), flavors=2)
        program = build_program(problem)
        best = brute_force(program)
        for solver in (exact.solve, search):
            found = solver(program)
            assert (best is None) == (found is None), seed
            if best is not None and found is not None:
                assert found.objective == pytest.approx(program.objective(best), abs=1e-9), seed
        infeasible += best is None
        grouped += any(option.other_groups for option in best or ())
        priced += len({name for option in best or () for name in option.flavors}) > 1

    assert min(grouped, priced, infeasible) > 20


def test_choices_to_compare_by_brute_force_stay_few():
    sizes = [
        [len(stage.options) for stage in build_program(a_hosting_problem(seed, 2, 2, (1, 16), flavors=2)).stages]
        for seed in range(20)
    ]

    assert max(itertools.chain(*sizes)) < 200
