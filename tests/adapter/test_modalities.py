"""ModalityMix in simulated time: jobs over subsets of digits heard, seen and read, with floors, under load."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.builders import a_chain, a_pipeline, a_plan, a_point_profile, a_profile, a_variant
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.planning.program_builder import batch_sizes, capped_batch_sizes
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import DROPPED, LATE, OK
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS
from trimtab_pipelines.shadow_price import with_shadow_price
from trimtab_router.request import RequestOptions

BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Senses:
    """Accuracy of each subset and its seconds for 64 rows, a fifth of which a batch costs however small."""

    accuracy: dict[str, float]
    full_seconds: dict[str, float]
    escalated_shares: tuple[float, ...] = ()

    def escalations(self, subset):
        """From a subset to each that has all its senses: the first rows gain most, as the least certain do."""
        for wider in self.accuracy:
            for share in self.escalated_shares if set(wider) > set(subset) else ():
                low, gain = self.accuracy[subset], self.accuracy[wider] - self.accuracy[subset]
                accuracy = round(low + gain * (1 - (1 - share) ** 3), 4)
                yield {"to": wider.lower(), "confidenceBelow": share**0.5, "share": share, "accuracy": accuracy}

    def law(self, subset):
        """(constant, linear) seconds."""
        return 0.2 * self.full_seconds[subset], 0.8 * self.full_seconds[subset] / 64

    def point(self, subset):
        constant, linear = self.law(subset)
        return {
            "name": subset.lower(),
            "accuracy": self.accuracy[subset],
            "serviceSeconds": {str(rows): constant + linear * rows for rows in BATCHES},
            "escalations": [*self.escalations(subset)],
        }

    def taking(self, times):
        """The same, where batches take so many times as long."""
        return replace(self, full_seconds={subset: times * full for subset, full in self.full_seconds.items()})

    def capacity(self, rows):
        """Jobs of so many rows a second, one after the other, at the best subset."""
        constant, linear = self.law("AVT")
        return 1.0 / (constant + linear * rows)


DIGITS = Senses(
    {"A": 0.519, "V": 0.261, "T": 0.423, "AV": 0.591, "AT": 0.782, "VT": 0.547, "AVT": 0.798},
    {"A": 0.0069, "V": 0.0239, "T": 0.0033, "AV": 0.0341, "AT": 0.0079, "VT": 0.0273, "AVT": 0.0398},
)
DIGITS_TWICE = replace(DIGITS, escalated_shares=(0.1, 0.3, 0.5))
"""The same, where the model's confidence picks rows worth escalating."""


def a_scenario(senses, rate, *, policy="ModalityMix", seconds=6.0, slo=0.3, floors, misjudged=1.0, sizes=BATCHES):
    """Jobs of 1 to 32 rows and random floors at so many a second.

    `misjudged`: the plan and its profile think that batches take so many times what they take.
    """
    thought = senses.taking(misjudged)
    rng = np.random.default_rng(1)
    (stage,) = chain = a_chain(1)
    if senses.escalated_shares:
        stage |= {"confidence": "sure", "outputs": [*stage["outputs"], {"name": "sure", "datatype": "FP32"}]}
    points = [thought.point(subset) | {"modalities": [*subset]} for subset in senses.accuracy]
    for point in points:
        del point["serviceSeconds"]
    stage |= {
        "inputs": [{"name": n, "from": f"request.inputs.{n}", "optional": True} for n in "AVT"],
        "batchSizes": list(sizes),
        "variants": [a_variant(operatingPoints=points, maxBatchSize=max(sizes))],
    }
    inputs = [{"name": name, "datatype": "FP32", "shape": [4], "optional": True} for name in "AVT"]
    pipeline = a_pipeline(chain, inputs=inputs, schedulingPolicy=policy, slo={"latency": f"{slo * 1000:g}ms"})
    profiles = [
        a_point_profile("small", *thought.law(subset)).model_copy(update={"operating_point": subset.lower()})
        for subset in senses.accuracy
    ]
    count = rng.poisson(rate * seconds)
    best, *others = (thought.point(subset) for subset in sorted(senses.accuracy, key=lambda s: -senses.accuracy[s]))
    del best["escalations"]
    plan = a_plan(pipeline, batchSize=64, operatingPoint=best.pop("name"), **best, fallbacks=others)
    priced = with_shadow_price(plan.spec.stages[0], 16.5 * rate)
    return Scenario(
        pipeline=pipeline,
        profiles={"stage-0": a_profile("stage-0", profiles)},
        arrivals_seconds=np.sort(rng.uniform(0, seconds, count)),
        duration_seconds=seconds,
        plan=plan.model_copy(update={"spec": plan.spec.model_copy(update={"stages": (priced,)})}),
        environment=Environment(spread=0.0, service_ratios={("stage-0", "small"): 1.0 / misjudged}),
        rows=tuple(rng.integers(1, 33, count).tolist()),
        options=tuple(RequestOptions(accuracy_floor=low) for low in rng.uniform(floors[0], floors[1], count).tolist()),
    )


def below_floor(scenario, found):
    """Of each request, whether its expected accuracy is below its floor."""
    return found.accuracy < np.array([options.accuracy_floor for options in scenario.options]) - 1e-3


def test_modality_mix_carries_twice_the_load_of_all_modalities():
    scenario = a_scenario(DIGITS, 2.0 * DIGITS.capacity(16.5), floors=(0.5, 0.58))
    found = simulate(scenario)

    assert not below_floor(scenario, found).any()
    assert found.violations <= 0.01


def test_rows_with_least_utility_are_dropped_last():
    scenario = a_scenario(DIGITS, 3.5 * DIGITS.capacity(16.5), floors=(0.78, 0.79))
    dear = np.arange(len(scenario.options)) % 4 == 0
    options = tuple(replace(one, priority=1 if dear[n] else 3) for n, one in enumerate(scenario.options))
    found = simulate(replace(scenario, options=options))

    assert found.share(DROPPED) > 0.05
    assert (found.outcomes[dear] == OK).mean() > 0.95


def scrutinised(senses, load, misjudged=1.0):
    """Jobs with floors that only the best subset reaches alone, at so many times what it carries."""
    return a_scenario(senses, load * DIGITS.capacity(16.5), floors=(0.784, 0.796), misjudged=misjudged)


@pytest.mark.parametrize("misjudged", [0.5, 1.5])
def test_shadow_price_of_wrong_latencies_is_corrected(misjudged):
    """Thought half as long, time seems to cost nothing: one job in six was below its floor."""
    scenarios = [scrutinised(DIGITS_TWICE, 2.0, times) for times in (1.0, misjudged)]
    right, wrong = (scenario.plan.spec.stages[0].shadow_price for scenario in scenarios)
    results = [simulate(scenario) for scenario in scenarios]
    violations = [
        ((found.outcomes != OK) | below_floor(scenario, found)).mean()
        for scenario, found in zip(scenarios, results, strict=True)
    ]

    assert wrong != pytest.approx(right, rel=0.1)
    assert violations[1] <= violations[0] + 0.02


@pytest.mark.parametrize("load", [1.0, 2.0, 3.0])
def test_escalation_carries_up_to_three_times_the_best_subset(load):
    """Charged as if they went alone, and sent off as soon as there were any, escalations left jobs below floors."""
    scenario = scrutinised(DIGITS_TWICE, load)
    found = simulate(scenario)

    assert found.violations <= (0.0 if load < 3.0 else 0.01)
    assert not (below_floor(scenario, found) & (found.outcomes <= LATE)).any()
    assert not found.unescalated.any()
    assert load == 1.0 or found.escalated_rows["stage-0"] > 0
    assert load == 1.0 or simulate(scrutinised(DIGITS, load)).violations > 0.04


@pytest.mark.parametrize(
    ("policy", "rows", "capped"),
    [
        (
            "ModalityMix",
            MAX_SPLIT_ROWS,
            ("stage-0: batches of at most 64 rows instead of 256: the limit of ModalityMix",),
        ),
        ("SlackFit", 256, ()),
    ],
)
def test_planned_batches_stay_within_the_policy_limit(policy, rows, capped):
    scenario = a_scenario(DIGITS, 1.0, policy=policy, sizes=(256,), slo=2.0, floors=(0.0, 0.0))
    plan = initial_plan(scenario.pipeline, scenario.profiles).spec

    assert (plan.stages[0].batch_size, plan.explanation.batch_sizes_capped) == (rows, capped)


def test_chats_that_are_written_side_by_side_are_no_batch():
    spec = load_pipeline(Path("pipelines/lmm-digits")).spec
    writes = next(stage for stage in spec.stages if stage.generates).model_copy(update={"batch_sizes": (96,)})
    mixing = spec.model_copy(update={"scheduling_policy": "ModalityMix", "stages": (writes,)})

    assert batch_sizes(mixing, writes, writes.pin) == [96]
    assert capped_batch_sizes(mixing) == ()
