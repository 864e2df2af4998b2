"""Chats in simulated time: exact where it can be computed by hand, and plans that choose a layout by the load."""

from dataclasses import replace

import numpy as np
import pytest

from tests.adapter.test_layouts import PROFILES, a_choosing_pipeline, planned
from tests.adapter.test_simulation import EXACT, poisson
from tests.router.disaggregated import PULLS, WHOLE, laid_out
from trimtab_adapter.controller import Controller
from trimtab_adapter.simulation.environment import Failure
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_adapter.simulation.transport import simulated_confidences
from trimtab_pipelines.escalation import TaskEscalation
from trimtab_pipelines.request_outcome import LATE, OK
from trimtab_predictor.forecaster import ReactiveForecaster
from trimtab_router.scheduling.policies.interface import Escalation, Point

PIPELINE = a_choosing_pipeline(adaptation={"interval": "5s", "forecaster": "Reactive", "scaleDownStabilization": "5s"})


def a_scenario(arrivals, *, disaggregated: bool, images=(2,), **changes) -> Scenario:
    """An encoder of 1 + 3 b ms, and a writer whose answers take three times as long as until they begin."""
    return Scenario(
        pipeline=changes.pop("pipeline", PIPELINE),
        profiles=changes.pop("profiles", PROFILES),
        arrivals_seconds=np.asarray(arrivals, dtype=np.float64),
        duration_seconds=changes.pop("duration", 10.0),
        plan=laid_out(PIPELINE, apart=disaggregated),
        environment=changes.pop("environment", EXACT),
        images=images,
        **changes,
    )


@pytest.mark.parametrize(
    ("disaggregated", "images", "seconds"),
    [
        (False, 0, 3 * (0.001 + 0.001 * 2.0)),
        (False, 2, 3 * (0.001 + 0.001 * (2.0 + 2 * 12.0))),
        (True, 0, 3 * (0.001 + 0.001 * 2.0)),
        (True, 2, 0.001 + 2 * 0.003 + 3 * (0.001 + 0.001 * (2.0 + 2 * 0.5))),
    ],
)
def test_a_lone_chat_takes_what_its_layout_takes(disaggregated, images, seconds):
    found = simulate(a_scenario([1.0], disaggregated=disaggregated, images=(images,)))

    assert found.outcomes.tolist() == [OK]
    assert found.latency_seconds[0] == pytest.approx(seconds)
    assert set(found.variants[0]) == ({"encode", "text"} if disaggregated and images else {"text"})


def test_the_promise_is_of_the_first_piece_and_of_the_pace():
    hurried = {"latency": "10s", "timeToFirstToken": "20ms"}  # 27 ms until it begins, 81 in all
    slow = {"latency": "10s", "timeToFirstToken": "50ms", "timePerOutputToken": "5ms"}  # eight more tokens in 54 ms

    assert simulate(a_scenario([1.0], disaggregated=False)).outcomes.tolist() == [OK]
    late = a_scenario([1.0], disaggregated=False, pipeline=a_choosing_pipeline(slo=hurried, dropPolicy="Never"))
    assert simulate(late).outcomes.tolist() == [LATE]
    paced = a_scenario([1.0], disaggregated=False, pipeline=a_choosing_pipeline(slo=slow, dropPolicy="Never"))
    assert simulate(paced).outcomes.tolist() == [LATE]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_writer_that_dies_loses_no_chat(rows):
    environment = replace(EXACT, failures=(Failure(1.015, "text"),), startup_seconds=0.5)
    pipeline = a_choosing_pipeline(slo={"latency": "9s"})
    found = simulate(
        a_scenario([1.0, 1.01, 3.0], disaggregated=True, environment=environment, pipeline=pipeline, rows=(rows,))
    )

    assert found.outcomes.tolist() == [OK, OK, OK]
    assert found.latency_seconds[0] > 0.5


def adapted(rate, *, environment=EXACT, disaggregated=False, images=(0,), **changes):
    """A minute of chats under a control loop that has settled after half of it."""
    scenario = a_scenario(
        poisson(rate, 60),
        duration=60.0,
        environment=replace(environment, startup_seconds=1.0),
        controller=Controller(ReactiveForecaster()),
        disaggregated=disaggregated,
        images=images,
        **changes,
    )
    found = simulate(scenario)
    assert (found.outcomes[found.arrivals_seconds > 30] == OK).mean() >= 0.99
    return found.plans[-1].spec


@pytest.mark.parametrize(("images", "variant"), [(0, WHOLE), (8, PULLS)])
def test_the_plan_comes_to_the_layout_that_its_load_asks_for(images, variant):
    last = adapted(40, images=(images,), disaggregated=variant == WHOLE)  # at first the other one

    assert last.stage("text").variant == variant
    assert (last.stage("encode").replicas == 0) == (variant == WHOLE)
    assert last.stage("text").variant == planned(40, float(images)).spec.stage("text").variant


def test_broken_promises_raise_replicas():
    last = adapted(100, environment=replace(EXACT, factors={("text", WHOLE): (5.0,)}))

    assert last.forecast is not None
    assert "because SLOs were missed" in last.explanation.change
    assert last.stage("text").replicas > planned(last.forecast.peak_rps, 0.0).spec.stage("text").replicas


BY_TASK = {
    "cars": TaskEscalation(confidence_below=0.6, share=0.3, accuracy=0.9),
    "birds": TaskEscalation(confidence_below=0, share=0, accuracy=0.4),
}
POINT = Point("fast", 0.7, lambda rows: 0.1 * rows, escalations=(Escalation(0.4, "full", 0.8, 0.15, BY_TASK),))


@pytest.mark.parametrize(("task", "share"), [("cars", 0.3), ("birds", 0.0)])
def test_measured_share_of_rows_has_low_confidence(task: str, share: float) -> None:
    drawn = np.random.default_rng(1).random(10_000)
    doubted = simulated_confidences(POINT, task, drawn) < POINT.escalations[0].for_task(task).confidence_below

    assert doubted.mean() == pytest.approx(share, abs=0.02)
