"""Layouts as options of one program: no choice mixes them, and the plan follows load and images a chat."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.adapter.problems import a_program, brute_force, search
from tests.builders import a_chat_point, a_point_profile, a_profile, a_variant
from tests.router.chats import a_chat_pipeline
from tests.router.disaggregated import PULLS, WHOLE, a_choosing_writer, an_encoder
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.slowdown_estimate import SlowdownEstimate
from trimtab_adapter.solvers import exact, highs
from trimtab_adapter.solvers.program import Program
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.router_state import RecentRequests


def divided(seed: int, program: Program) -> Program:
    """A program in which some options of some stages are of one layout or the other."""
    random = np.random.default_rng([seed, 9])
    return replace(
        program,
        stages=tuple(
            replace(
                stage,
                options=tuple(
                    o._replace(disaggregated=(None, True, False)[int(random.integers(3))]) for o in stage.options
                ),
            )
            for stage in program.stages
        ),
    )


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("solve", [exact.solve, search, highs.solve], ids=["exact", "search", "HiGHS"])
def test_no_choice_mixes_layouts_and_the_best_is_found(block, solve):
    feasible = mixed = 0
    for seed in range(block * 100, block * 100 + 100):
        program = divided(seed, a_program(seed))
        best, found = brute_force(program), solve(program)
        assert (best is None) == (found is None)
        if best is not None and found is not None:
            assert program.is_feasible(found.choice)
            assert found.objective == pytest.approx(program.objective(best), abs=1e-7)
            free = brute_force(a_program(seed))
            mixed += free is not None and program.objective(free) > found.objective + 1e-9
            feasible += 1
    assert feasible > 30
    assert mixed > 5  # the layout kept some from the choice that would be best without it


def a_choosing_pipeline(transfer: str = "5ms", pin: str | None = None, **changes):
    core = {"cpu": "1"}
    encoder = an_encoder() | {"variants": [a_variant(accuracy=1.0, resources=core)], "embeddingTransfer": transfer}
    writer = a_choosing_writer() | {
        "variants": [a_variant(PULLS, resources=core), a_variant(WHOLE, encoder="Colocated", resources=core)],
        "pin": {"variant": pin},
    }
    slo = {"latency": "10s", "timeToFirstToken": "200ms", "timePerOutputToken": "100ms"}
    return a_chat_pipeline([encoder, writer], **({"slo": slo, "budget": {"cores": "16"}} | changes))


def a_chat_profile(variant: str, text_ms: float, image_ms: float) -> PointProfile:
    """Answers begin after so many milliseconds a chat and an image, and take three times as long in all."""
    laws = [(0.001 * n, 0.001 * n * (text_ms + images * image_ms)) for images in (1, 0) for n in (3, 1)]
    return a_chat_point(variant, *laws, tokens=9.0)


PROFILES = {
    "encode": a_profile("encode", [a_point_profile("small", 0.001, 0.003)]),
    "text": a_profile("text", [a_chat_profile(PULLS, 2.0, 0.5), a_chat_profile(WHOLE, 2.0, 12.0)]),
}


FOUR_CORES = {"cores": "4"}


def planned(rps: float, images: float, current=None, slowdown: float = 1.0, **changes):
    inputs = PlanningInputs(
        ForecastRecord(peak_rps=rps, source="reactive"),
        0.0,
        current,
        rows_per_request={"encode": images},
        slowdown=slowdown,
    )
    return decide(a_choosing_pipeline(**changes), PROFILES, inputs)


def test_encoder_placement_follows_the_images_per_chat():
    none, many = planned(100, 0.0), planned(40, 8.0)

    assert none.spec.stage("encode").replicas == 0
    assert none.spec.stage("text").variant == WHOLE
    assert none.spec.explanation.placement.startswith("colocated; disaggregated (encode small ×1")
    assert none.spec.expected.cores == none.spec.stage("text").replicas
    assert many.spec.stage("encode").replicas > 0
    assert many.spec.stage("text").variant == PULLS
    assert many.spec.explanation.placement.startswith("disaggregated; colocated")
    turned = planned(100, 0.0, current=many)
    assert "encode: small ×2 batch 8 → no replicas" in turned.spec.explanation.change


def test_the_runner_up_names_the_other_layout_and_a_change_costs():
    none = planned(20, 0.0)
    runner_up = none.spec.explanation.runner_up
    assert runner_up is not None
    assert runner_up.stages == {"encode": "small ×1 batch 1", "text": "small ×1 batch 2"} or "text" in runner_up.stages

    many = planned(20, 8.0)
    assert planned(20, 0.0, current=many).spec.stage("text").variant == WHOLE
    best = {"goal": "MaxAccuracy"}  # to which a core is worth less than a change
    assert planned(20, 0.0, current=many, objective=best).spec.stage("text").variant == PULLS


def test_embedding_transfer_counts_into_time_to_first_token():
    quick, slow = planned(40, 8.0), planned(40, 8.0, transfer="180ms")

    assert quick.spec.stage("text").variant == PULLS
    assert slow.spec.stage("text").variant == WHOLE
    assert slow.spec.explanation.placement.endswith("no plan carries this load within the SLO")


def test_a_pinned_variant_decides():
    pinned = planned(20, 0.0, pin=PULLS)

    assert pinned.spec.stage("encode").replicas == 1
    assert pinned.spec.explanation.placement == ""


def test_chats_without_images_count_and_empty_fan_outs_do_not():
    pipeline = a_choosing_pipeline()

    assert PlanningProblem(pipeline.spec, PROFILES, 1.0, {"encode": 0.0, "text": 0.0}).rows("encode") == 0.0
    assert PlanningProblem(pipeline.spec, PROFILES, 1.0, {"encode": 0.0, "text": 0.0}).rows("text") == 1.0
    assert PlanningProblem(pipeline.spec, PROFILES, 1.0, {"encode": 7.0}).images("text") == 7.0


def test_without_first_token_times_the_latency_slo_is_used():
    old = PROFILES | {"text": a_profile("text", [a_point_profile(PULLS), a_point_profile(WHOLE)])}
    pipeline = a_choosing_pipeline()

    assert PlanningProblem(pipeline.spec, PROFILES, 1.0).latency_target == ("slo.timeToFirstToken", 0.2)
    assert PlanningProblem(pipeline.spec, old, 1.0).latency_target == ("slo.latency", 10.0)


def test_answers_that_would_go_on_too_slowly_are_not_planned():
    slo = {"latency": "10s", "timeToFirstToken": "200ms", "timePerOutputToken": "2ms"}

    brisk = planned(20, 0.0, slo=slo)  # 2 × (2 b + 1) ms over eight tokens
    assert brisk.spec.stage("text").batch_size <= 2
    assert planned(20, 0.0).spec.stage("text").batch_size > 2


def test_missed_slos_raise_the_planned_capacity():
    calm, strained = planned(300, 0.0), planned(300, 0.0, slowdown=2.0)

    assert strained.spec.stage("text").replicas > calm.spec.stage("text").replicas
    assert "with 2 times the profiled seconds, because SLOs were missed" in strained.spec.explanation.change


def test_slowdown_of_generation_also_applies_to_encoders():
    calm, strained = planned(40, 8.0, pin=PULLS), planned(40, 8.0, pin=PULLS, slowdown=2.0)

    assert strained.spec.stage("encode").replicas > calm.spec.stage("encode").replicas


@cache
def most_on_four_cores(images: float) -> float:
    low, high = 1.0, 2_000.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if planned(middle, images, budget=FOUR_CORES).spec.feasible else (low, middle)
    return low


@pytest.mark.parametrize("images", [0.0, 1.0, 4.0, 8.0])
@pytest.mark.parametrize("share", [0.6, 0.9, 1.0, 1.5])
def test_slowdown_is_reduced_before_load_is_given_up(images, share):
    rps = share * most_on_four_cores(images)
    calm, strained = (planned(rps, images, slowdown=slowdown, budget=FOUR_CORES).spec for slowdown in (1.0, 4.0))

    assert strained.feasible == calm.feasible
    assert strained.planned_fraction >= calm.planned_fraction


def test_slowdown_rises_at_once_and_decays_after_quiet_decisions():
    def after(slowdown, ok, late):
        return slowdown.after(RecentRequests(ok=ok, late=late))

    start = SlowdownEstimate()
    assert start.after(RecentRequests(ok=90, dropped=10, dropped_by_client=10)).factor == 1.0
    assert after(start, 10, 10) == start  # too few to tell one in a hundred
    raised = after(start, 90, 10)
    assert raised.factor == 1.125
    assert after(raised, 95, 5).factor == 1.125  # of the same minute, and fewer are late
    assert after(raised, 89, 11).factor == 1.125**2
    assert after(start, 50, 50).factor == 2.0
    assert after(start, 0, 100).factor == 4.0
    worst = start
    for late in range(2, 50):
        worst = after(worst, 100 - late, late)
    assert worst.factor == 4.0
    calm = raised
    for _ in range(2):
        calm = after(calm, 100, 0)
    assert calm.factor == 1.125
    assert after(calm, 100, 0) == start
