"""Jobs over subsets of their inputs, by every policy that chooses among them, in simulated time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.adapter.modalities import DIGITS, DIGITS_TWICE, TVLT, a_scenario
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.planning.program_builder import batch_sizes, capped_batch_sizes
from trimtab_adapter.simulation.simulator import simulate
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import DROPPED, LATE, OK
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS


def floors_kept(scenario, found):
    """Whether every answer has at least the accuracy wished for, by expectation."""
    floors = np.array([wish.accuracy_floor for wish in scenario.options])
    answered = found.outcomes <= LATE
    return bool((found.accuracy[answered] >= floors[answered] - 1e-4).all())


def test_modality_mix_keeps_every_floor_at_low_load():
    scenario = a_scenario(DIGITS, 15.0, policy="ModalityMix", seconds=4.0, floors=(0.5, 0.79))
    found = simulate(scenario)

    assert found.share(OK) == 1.0
    assert floors_kept(scenario, found)
    assert found.mean_accuracy == pytest.approx(0.798)


@pytest.mark.parametrize(
    ("senses", "slo", "floors"), [(DIGITS, 0.3, (0.5, 0.58)), (TVLT, 3.0, (0.67, 0.75))], ids=["digits", "tvlt"]
)
def test_modality_mix_carries_twice_the_load_of_all_modalities(senses, slo, floors):
    rate = 2.0 * senses.capacity(16.5)
    scenario = a_scenario(senses, rate, policy="ModalityMix", seconds=6.0, slo=slo, floors=floors, price=True)
    result = simulate(scenario)

    assert floors_kept(scenario, result)
    assert result.violations <= 0.01


def test_floor_between_two_subsets_is_met_by_a_cheaper_mix():
    """All 32 rows of every job at 0.784 or more: AT has 0.782, AVT 0.798 and takes five times as long."""
    rate = 1.45 * DIGITS.capacity(32)
    scenarios = {
        policy: a_scenario(DIGITS, rate, policy=policy, seconds=8.0, sizes=(32, 32), floors=(0.784, 0.785), slo=0.3)
        for policy in ("ModalityMix", "SlackFit")
    }
    found = {policy: simulate(scenario) for policy, scenario in scenarios.items()}

    assert found["ModalityMix"].share(OK) > found["SlackFit"].share(OK) + 0.1
    assert floors_kept(scenarios["ModalityMix"], found["ModalityMix"])


def test_missing_modality_delays_no_request():
    scenario = a_scenario(DIGITS, 60.0, policy="ModalityMix", seconds=4.0, sizes=(1, 4), slo=0.3)
    found = simulate(replace(scenario, missing_inputs=(frozenset(), frozenset("V"), frozenset("V"))))

    assert found.share(OK) == 1.0
    assert found.accuracy[1] == pytest.approx(0.782), "the best without video"


def test_small_jobs_share_batches():
    rate = 3.0 * DIGITS.capacity(1)
    found = simulate(a_scenario(DIGITS, rate, policy="ModalityMix", seconds=4.0, sizes=(1, 1), slo=0.2))

    assert found.share(OK) == 1.0
    assert found.batch_rows["stage-0"] > 3


def test_rows_with_least_utility_are_dropped_last():
    rate = 2.5 * DIGITS.capacity(16.5)
    scenario = a_scenario(DIGITS, rate, policy="ModalityMix", seconds=4.0, slo=0.3, floors=(0.78, 0.79))
    dear = np.arange(len(scenario.options)) % 4 == 0
    wishes = tuple(replace(wish, priority=1 if dear[n] else 3) for n, wish in enumerate(scenario.options))
    found = simulate(replace(scenario, options=wishes))

    assert found.share(DROPPED) > 0.05
    assert (found.outcomes[dear] == OK).mean() > 0.98


def test_several_replicas_are_all_used():
    scenario = a_scenario(DIGITS, 2.4 * DIGITS.capacity(16.5), policy="ModalityMix", seconds=6.0, slo=0.3)
    stage = scenario.plan.spec.stages[0].replace(replicas=2)
    one, two = simulate(scenario), simulate(replace(scenario, plan=scenario.plan.with_spec(stages=(stage,))))

    assert two.share(OK) == 1.0
    assert two.mean_accuracy > one.mean_accuracy


def test_a_price_of_time_keeps_room_for_those_to_come():
    rate, floors = 2.0 * TVLT.capacity(16.5), (0.67, 0.75)
    free, held = (
        simulate(a_scenario(TVLT, rate, policy="ModalityMix", seconds=12.0, slo=3.0, floors=floors, price=price))
        for price in (False, True)
    )

    assert free.violations > 0.05
    assert held.violations < free.violations / 2


def scrutinised(senses, load, misjudged=1.0):
    """Jobs with floors that only the best subset reaches alone, at so many times what it carries."""
    rate, floors = load * DIGITS.capacity(16.5), (0.784, 0.796)
    changes = {"seconds": 6.0, "slo": 0.3, "floors": floors, "price": True, "misjudged": misjudged}
    return a_scenario(senses, rate, policy="ModalityMix", **changes)


@pytest.mark.parametrize("misjudged", [0.5, 1.5])
def test_shadow_price_of_wrong_latencies_is_corrected(misjudged):
    """Thought half as long, time seems to cost nothing: one job in six was below its floor."""
    right, wrong = (scrutinised(DIGITS_TWICE, 2.0, times) for times in (1.0, misjudged))
    planned = [scenario.plan.spec.stages[0].shadow_price for scenario in (right, wrong)]
    violations = []
    for scenario in (right, wrong):
        found = simulate(scenario)
        floors = np.array([wish.accuracy_floor for wish in scenario.options])
        violations.append(float(((found.outcomes != OK) | (found.accuracy < floors - 1e-3)).mean()))

    assert planned[1] != pytest.approx(planned[0], rel=0.1)
    assert violations[1] <= violations[0] + 0.02


def test_escalation_meets_the_slo_where_the_best_subset_cannot():
    once, twice = (simulate(scrutinised(senses, 2.0)) for senses in (DIGITS, DIGITS_TWICE))

    assert once.violations > 0.05
    assert twice.violations == 0.0
    assert twice.escalated_rows["stage-0"] > 0
    assert not twice.unescalated.any()


@pytest.mark.parametrize(("load", "violations"), [(1.0, 0.0), (3.0, 0.01)])
def test_escalation_carries_three_times_the_best_subset(load, violations):
    """Charged as if they went alone, and sent off as soon as there were any, they left jobs below their floors."""
    scenario = scrutinised(DIGITS_TWICE, load)
    found = simulate(scenario)

    assert found.violations <= violations
    assert not found.unescalated.any()
    assert floors_kept(scenario, found)


def test_only_provisional_answers_are_below_their_floor():
    scenario = scrutinised(DIGITS_TWICE, 4.0)
    found = simulate(scenario)
    floors = np.array([wish.accuracy_floor for wish in scenario.options])
    below = found.accuracy < floors - 1e-3

    assert below.any()
    assert not (below & ~found.unescalated).any()


def test_requests_without_a_modality_share_batches():
    """Three in ten have no video, under a load at which most of the others are answered without theirs."""
    full = a_scenario(DIGITS, 8.0 * DIGITS.capacity(4.5), policy="ModalityMix", seconds=4.0, sizes=(1, 8), slo=0.3)
    none, video = frozenset[str](), frozenset("V")
    lacking = replace(full, missing_inputs=(none, none, video, none, none, video, none, none, none, video))
    all_there, some_not = simulate(full), simulate(lacking)

    rows_by_point = {point: rows for (_, point), rows in all_there.rows_by_point["stage-0"].items()}
    assert rows_by_point["at"] > rows_by_point["avt"]
    assert some_not.batch_rows["stage-0"] >= 0.9 * all_there.batch_rows["stage-0"]
    assert some_not.violations <= all_there.violations


def test_planned_batches_stay_within_the_policy_limit():
    """The floor leaves one subset: what a replica carries is the rows of its full batches over their seconds."""
    overload = 2.0 * DIGITS.capacity(64)
    changes = {"sizes": (64, 64), "floors": (0.79, 0.795), "slo": 0.5, "seconds": 20.0, "batch_sizes": (256,)}
    scenario = a_scenario(DIGITS, overload, policy="ModalityMix", **changes)
    plan = initial_plan(scenario.pipeline, scenario.profiles)
    (stage,) = plan.spec.stages
    alone = stage.replace(upgrades=(), fallbacks=())
    found = simulate(replace(scenario, plan=plan.with_spec(stages=(alone,))))
    carried_rps = found.share(OK) * len(found.outcomes) * 64 / scenario.duration_seconds
    planned_rps = stage.batch_size / stage.service_seconds[stage.batch_size]

    assert (stage.batch_size, stage.operating_point) == (MAX_SPLIT_ROWS, "avt")
    assert carried_rps == pytest.approx(planned_rps, rel=0.05)
    assert plan.spec.explanation.batch_sizes_capped == (
        "stage-0: batches of at most 64 rows instead of 256: the limit of ModalityMix",
    )


def test_chats_that_are_written_side_by_side_are_no_batch():
    spec = load_pipeline(Path("pipelines/lmm-digits")).spec
    writes = next(stage for stage in spec.stages if stage.generates).replace(batch_sizes=(96,))
    mixing = spec.replace(scheduling_policy="ModalityMix", stages=(writes,))

    assert batch_sizes(mixing, writes, writes.pin) == [96]
    assert capped_batch_sizes(mixing) == ()


def test_other_policies_plan_the_batches_that_were_asked_for():
    scenario = a_scenario(DIGITS, 1.0, policy="SlackFit", batch_sizes=(256,), slo=2.0)
    plan = initial_plan(scenario.pipeline, scenario.profiles).spec

    assert (plan.stages[0].batch_size, plan.explanation.batch_sizes_capped) == (256, ())
