"""Prompts of many tokens: planned for as they come, and simulated by the router's own code."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.adapter.test_layouts import PROFILES, a_chat_profile, a_choosing_pipeline
from tests.adapter.test_simulated_chats import a_scenario, adapted
from tests.adapter.test_simulation import EXACT
from tests.builders import a_profile
from tests.router.disaggregated import WHOLE, laid_out
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_adapter.planning.planning_problem import point_profile
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.request_outcome import LATE, OK

READING = {20: 0.003, 1020: 0.503}
"""Half a millisecond a token beyond twenty."""


def reading(profile):
    """A profile with prompt sizes: 20 text tokens, and 16 tokens per image."""

    def of(point):
        measured = {"prompt_tokens": 36.0, "text_prompt_tokens": 20.0, "prefill_seconds": READING}
        return point.replace(chats=point.chats.replace(**measured))

    return profile.with_spec(points=tuple(of(point) for point in profile.spec.points))


READ = {**PROFILES, "text": reading(PROFILES["text"])}
PIPELINE = a_choosing_pipeline(
    pin=WHOLE, adaptation={"interval": "5s", "forecaster": "Reactive", "scaleDownStabilization": "5s"}
)


def planned(tokens, *, images=0.0, profiles=READ, rps=50.0) -> PipelinePlan:
    inputs = PlanningInputs(
        ForecastRecord(peak_rps=rps, source="reactive"),
        0.0,
        rows_per_request={"encode": images},
        prompt_tokens={} if tokens is None else {"text": tokens},
    )
    return decide(PIPELINE, profiles, inputs)


def test_generation_is_planned_for_the_tokens_of_prompts():
    usual, longer = planned(20.0).spec, planned(220.0).spec  # a tenth of a second more each
    one, other = usual.stage("text"), longer.stage("text")

    assert other.replicas > one.replicas
    assert other.throughput_rps >= 50.0
    assert (one.prompt_tokens, other.prompt_tokens) == (20.0, 220.0)
    assert other.prefill_seconds == READING
    assert other.service_seconds[1] == pytest.approx(one.service_seconds[1] + 0.1)
    assert "text: prompts of 220 tokens, 1.21e+04 tokens/s" in longer.explanation.change  # with headroom


@pytest.mark.parametrize("tokens", [None, 0.0, 8.0, 36.0])
def test_no_more_tokens_than_profiled_keep_the_plan(tokens):
    measured, before = planned(tokens, images=1.0).spec, planned(tokens, images=1.0, profiles=PROFILES).spec

    assert [(s.replicas, s.batch_size, s.service_seconds) for s in measured.stages] == [
        (s.replicas, s.batch_size, s.service_seconds) for s in before.stages
    ]
    assert before.stage("text").prefill_seconds == {}


def test_points_differ_in_tokens_as_profiled():
    (full,) = (point for point in READ["text"].spec.points if point.variant == WHOLE)
    few = full.replace(operating_point="few", chats=full.chats.replace(prompt_tokens=24.0))
    spec = READ["text"].spec.replace(points=(full, few))
    stage: Any = PIPELINE.spec.stage("text")
    problem: Any = SimpleNamespace(
        profiles={"text": SimpleNamespace(spec=spec)},
        prompt_tokens={"text": 56.0},  # at the planned point, whose images have 16 tokens, not 4
        running=lambda _: SimpleNamespace(variant=WHOLE, operating_point=full.operating_point, cores=full.cores),
        images=lambda _: 1.0,
    )
    point: Any = SimpleNamespace(name="few")

    assert point_profile(problem, stage, stage.variant(WHOLE), point) == few.for_chats(1.0, 44.0)


SLOW = {**READ, "text": reading(a_profile("text", [a_chat_profile(WHOLE, 60.0, 12.0)]))}
"""Answers begin after 61 ms, or after 121 beside another, and take three times as long in all."""


@pytest.mark.parametrize(("known", "late"), [(True, 0), (False, 1)])
def test_long_prompt_takes_the_first_slot_if_another_can_wait(known, late):
    """Two places are free after 183 and 463 ms; the long prompt takes 200 ms more than the short one before it."""
    promised = {"latency": "10s", "timeToFirstToken": "600ms"}
    pipeline = a_choosing_pipeline(pin=WHOLE, slo=promised, dropPolicy="Never")
    plan = planned(20.0, profiles=SLOW, rps=1.0)
    text = plan.spec.stage("text").replace(batch_size=2, replicas=1)
    text = text if known else text.replace(prefill_seconds={})
    stages = tuple(text if stage.name == "text" else stage for stage in plan.spec.stages)
    found = simulate(
        Scenario(
            pipeline=pipeline,
            profiles=SLOW,
            arrivals_seconds=np.array([0.0, 5.0, 5.1, 5.101, 5.102]),
            duration_seconds=10.0,
            plan=plan.with_spec(stages=stages),
            environment=EXACT,
            images=(0,),
            text_tokens=(20, 20, 20, 20, 420),
        )
    )

    assert found.outcomes.tolist() == [OK] * (5 - late) + [LATE] * late
    long_seconds = found.latency_seconds[4] - 2 * 0.121  # until it begins
    assert long_seconds == pytest.approx(0.402 if known else 0.682, abs=0.002)


def test_a_plan_follows_the_prompts_that_come():
    text = adapted(20, pipeline=PIPELINE, profiles=READ, text_tokens=(320,)).stage("text")

    assert text.prompt_tokens == pytest.approx(320.0, rel=0.05)
    assert text.replicas > planned(20.0, rps=20.0).spec.stage("text").replicas


def test_images_join_the_prompts_that_are_simulated():
    found = simulate(
        replace(
            a_scenario([1.0], disaggregated=True, images=(2,)),
            profiles=READ,
            text_tokens=(120,),
            plan=laid_out(PIPELINE, apart=True),
        )
    )

    # 120 tokens of words and 32 of images, of which 52 were profiled; an encoder of 1 + 3 b ms before
    known = 0.001 + 2 * 0.003 + 3 * (0.001 + 0.001 * (2.0 + 2 * 0.5))
    assert found.latency_seconds[0] == pytest.approx(known + 100 * 0.0005)
