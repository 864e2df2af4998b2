"""Properties of every plan: chains and branches, CPU and GPU, pins, any budget, any solver."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapter.scenes import solve_together
from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_variant
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.program_builder import Relaxation, build_program
from trimtab_adapter.planning.relaxation import SOLVERS
from trimtab_pipelines.spec import Pool

VARIANTS = ("light", "middle", "heavy", "on-gpu")
PROFILES = [
    a_point_profile("light", 0.001, 0.001),
    a_point_profile("middle", 0.003, 0.005),
    a_point_profile("heavy", 0.010, 0.020),
    a_point_profile("on-gpu", 0.002, 0.001),
]
ACCURACIES = dict(zip(VARIANTS, (0.7, 0.85, 0.95, 0.95), strict=True))


@st.composite
def pipelines(draw):
    """A chain or a diamond of up to four stages, some pinned, with any goal and budget."""
    stages = a_chain(draw(st.integers(1, 4)))
    if len(stages) == 4 and draw(st.booleans()):
        stages[2]["inputs"] = [{"name": "x", "from": "stage-0.outputs.y"}]
        stages[3]["inputs"] = [{"name": n, "from": f"stage-{k}.outputs.y"} for n, k in (("x", 1), ("z", 2))]
    for stage in stages:
        stage["variants"] = [
            a_variant(name, accuracy=ACCURACIES[name], resources={"cpu": 1, "gpu": int(name == "on-gpu")})
            for name in VARIANTS
        ]
        stage["batchSizes"] = [1, 4, 16]
        stage["pin"] = draw(
            st.sampled_from(
                [{}, {}, {}, {"variant": "middle"}, {"batchSize": 4}, {"replicas": 2}, {"variant": "on-gpu"}]
            )
        )
    return a_pipeline(
        stages,
        budget={"cores": draw(st.integers(len(stages), 24)), "gpus": draw(st.integers(0, 4))},
        slo={"latency": draw(st.floats(0.02, 1.0))},
        objective={
            "goal": draw(st.sampled_from(["Weighted", "MaxAccuracy", "MinCost"])),
            "accuracyWeight": draw(st.sampled_from([1, 10, 100])),
            "accuracyMetric": draw(st.sampled_from(["Product", "NormalizedRanks"])),
            "accuracyFloor": draw(st.sampled_from([0.0, 0.5, 0.8])),
        },
    )


def problem(pipeline, load_rps):
    return PlanningProblem(pipeline.spec, profiles(pipeline), load_rps)


def profiles(pipeline):
    return {stage.name: a_profile(stage.name, PROFILES) for stage in pipeline.spec.stages}


def answerless(pipeline):
    """Tell whether nothing fits the budget even at no load, with neither SLO nor floor nor pins to keep."""
    relaxed = Relaxation(fraction=0.0, slo_seconds=float("inf"), floor=True, pins=True)
    return SOLVERS["Exact"](build_program(problem(pipeline, 0.0), relaxed)) is None


LOADS = st.floats(0, 800)


@settings(max_examples=80, deadline=None)
@given(pipelines(), LOADS)
def test_a_plan_keeps_its_budget_its_pins_and_its_word(pipeline, load_rps):
    try:
        plan = initial_plan(pipeline, profiles(pipeline), load_rps)
    except PlanningError:  # not even the smallest replicas fit, for instance where a GPU is pinned that is not there
        assert answerless(pipeline)
        return
    spec, budget = plan.spec, pipeline.spec.budget
    gpus = sum(s.replicas for s in spec.stages if s.variant == "on-gpu")

    assert sum(stage.replicas * stage.cores for stage in spec.stages) <= budget.cores + 1e-9
    assert gpus <= budget.gpus
    assert spec.expected is not None
    assert spec.expected.gpus == gpus
    if spec.feasible:
        assert spec.expected.latency_seconds <= pipeline.spec.slo.latency_seconds + 1e-9
        for stage, planned in zip(pipeline.spec.stages, spec.stages, strict=True):
            pin = stage.pin
            assert pin.variant in {None, planned.variant}
            assert pin.replicas in {None, planned.replicas}
            assert planned.throughput_rps >= load_rps


@settings(max_examples=25, deadline=None)
@given(pipelines(), pipelines(), LOADS, LOADS, st.floats(0.1, 0.9))
def test_planned_together_is_never_worse_than_any_split(one, other, one_rps, other_rps, part):
    asked = {"one": problem(one, one_rps), "other": problem(other, other_rps)}
    cores, gpus = 20.0, 4
    shares = {"one": part * cores, "other": (1 - part) * cores}
    try:
        together = solve_together(Pool(cores=cores, gpus=gpus), asked)
    except PlanningError:
        return
    used = [option for found in together.values() for option in found.solution.choice]

    assert sum(option.cores for option in used) <= cores + 1e-9
    assert sum(option.gpus for option in used) <= gpus
    disaggregated = [
        SOLVERS["Exact"](replace(build_program(q), cores=min(shares[k], q.spec.budget.cores), gpus=2))
        for k, q in asked.items()
    ]
    feasible = [found for found in disaggregated if found is not None]
    if len(feasible) == 2 and all(q.spec.budget.gpus >= 2 for q in asked.values()):
        assert all(found.feasible for found in together.values())
        total = sum(found.solution.objective for found in together.values())
        assert total >= sum(found.objective for found in feasible) - 1e-9
