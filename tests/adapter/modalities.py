"""Jobs of several senses under load: digits heard, seen and read, and a model of two senses of which one is dear."""

from dataclasses import dataclass, replace

import numpy as np

from tests.builders import a_chain, a_pipeline, a_plan, a_profile, a_variant, point_profiles
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.simulator import Scenario
from trimtab_pipelines.shadow_price import with_shadow_price
from trimtab_router.request import RequestOptions

BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Senses:
    """Accuracy of each subset, seconds of 64 rows, and which part of these a batch costs however small."""

    accuracy: dict[str, float]
    full_seconds: dict[str, float]
    fixed_share: float = 0.2
    looks_shares: tuple[float, ...] = ()

    def looks(self, subset):
        """From a subset to each that has all its senses: the first rows gain most, as the least certain do."""
        for wider in self.accuracy:
            if set(wider) > set(subset):
                low, gain = self.accuracy[subset], self.accuracy[wider] - self.accuracy[subset]
                for share in self.looks_shares:
                    accuracy = round(low + gain * (1 - (1 - share) ** 3), 4)
                    yield {"to": wider.lower(), "confidenceBelow": share**0.5, "share": share, "accuracy": accuracy}

    def law(self, subset):
        """(constant, linear) seconds."""
        full = self.full_seconds[subset]
        return self.fixed_share * full, (1 - self.fixed_share) * full / 64

    def seconds(self, subset, rows):
        constant, linear = self.law(subset)
        return constant + linear * rows

    def taking(self, times):
        """The same, where batches take so many times as long."""
        return replace(self, full_seconds={subset: times * full for subset, full in self.full_seconds.items()})

    @property
    def best(self):
        return max(self.accuracy, key=self.accuracy.__getitem__)

    def capacity(self, rows, subset=None):
        """Jobs of so many rows a second, one after the other, at the best subset where none is named."""
        return 1.0 / self.seconds(subset or self.best, rows)


DIGITS = Senses(
    {"A": 0.519, "V": 0.261, "T": 0.423, "AV": 0.591, "AT": 0.782, "VT": 0.547, "AVT": 0.798},
    {"A": 0.0069, "V": 0.0239, "T": 0.0033, "AV": 0.0341, "AT": 0.0079, "VT": 0.0273, "AVT": 0.0398},
)
DIGITS_TWICE = replace(DIGITS, looks_shares=(0.1, 0.3, 0.5))
"""The same, where the model's confidence picks rows worth looking at again."""
TVLT = Senses({"A": 0.67, "V": 0.70, "AV": 0.80}, {"A": 0.05, "V": 0.45, "AV": 0.55}, fixed_share=0.1)
"""The audio alone answers eleven times as fast."""


def a_scenario(
    senses,
    rate,
    *,
    policy,
    seconds=20.0,
    slo=0.5,
    sizes=(1, 32),
    floors=None,
    seed=0,
    bursts=1.0,
    price=False,
    misjudged=1.0,
    batch_sizes=BATCHES,
    **changes,
):
    """Jobs of random sizes and floors at so many a second; with bursts, twice a period so many times as often.

    `misjudged`: the plan and its profile think that batches take so many times what they take.
    """
    thought = senses.taking(misjudged)
    rng = np.random.default_rng(seed)
    inputs = [{"name": name, "datatype": "FP32", "shape": [4], "optional": True} for name in "AVT"]
    chain = a_chain(1)
    if senses.looks_shares:
        chain[0] |= {"confidence": "sure", "outputs": [*chain[0]["outputs"], {"name": "sure", "datatype": "FP32"}]}
    chain[0]["inputs"] = [{"name": n, "from": f"request.inputs.{n}", "optional": True} for n in "AVT"]
    points = [
        {"name": name.lower(), "accuracy": accuracy, "modalities": list(name), "escalations": [*senses.looks(name)]}
        for name, accuracy in senses.accuracy.items()
    ]
    chain[0]["batchSizes"] = list(batch_sizes)
    chain[0]["variants"] = [a_variant(operatingPoints=points, maxBatchSize=max(batch_sizes))]
    pipeline = a_pipeline(chain, inputs=inputs, schedulingPolicy=policy, slo={"latency": f"{slo * 1000:g}ms"})
    profiles = point_profiles({name.lower(): thought.law(name) for name in senses.accuracy})
    arrivals = _arrivals(rng, rate, seconds, bursts)
    count, (lowest, highest) = max(arrivals.size, 1), floors or (0.0, 0.0)
    return Scenario(
        pipeline=pipeline,
        profiles={"stage-0": a_profile("stage-0", profiles)},
        arrivals_seconds=arrivals,
        duration_seconds=seconds,
        plan=_plan(pipeline, thought, rate * sum(sizes) / 2 if price else 0.0),
        environment=Environment(spread=0.0, service_ratios={("stage-0", "small"): 1.0 / misjudged}),
        rows=tuple(rng.integers(sizes[0], sizes[1] + 1, count).tolist()),
        options=tuple(RequestOptions(accuracy_floor=n) for n in rng.uniform(lowest, highest, count).tolist()),
        **changes,
    )


def _arrivals(rng, rate, seconds, bursts):
    """Half of each period of four seconds has `bursts` times the load of the other half; the mean is `rate`."""
    low = 2 * rate / (1 + bursts)
    count = rng.poisson(low * max(bursts, 1.0) * seconds)
    at = np.sort(rng.uniform(0, seconds, count))
    wanted = np.where(at % 4.0 < 2.0, bursts, 1.0) / max(bursts, 1.0)
    return at[rng.random(count) < wanted]


def _plan(pipeline, senses, rows_rps):
    def table(name):
        return {str(rows): senses.seconds(name, rows) for rows in BATCHES}

    best = senses.best
    others = sorted((name for name in senses.accuracy if name != best), key=lambda name: -senses.accuracy[name])
    plan = a_plan(
        pipeline,
        batchSize=64,
        operatingPoint=best.lower(),
        accuracy=senses.accuracy[best],
        serviceSeconds=table(best),
        fallbacks=[
            {
                "name": name.lower(),
                "accuracy": senses.accuracy[name],
                "serviceSeconds": table(name),
                "escalations": [*senses.looks(name)],
            }
            for name in others
        ],
    )
    return plan.with_spec(stages=(with_shadow_price(plan.spec.stages[0], rows_rps),))
