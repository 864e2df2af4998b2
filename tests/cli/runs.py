"""A recorded run of two minutes with known figures."""

import numpy as np

from tests.cli.pipelines import echo_pipeline, echo_plan
from trimtab.local.counters import Counters
from trimtab.local.supervisor import Fault
from trimtab.run_samples import Run, Sample, StageSample
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.request_outcome import RequestOutcome

BEGAN = 1_000_000.0
SECONDS = 120


def a_record(second: int, n: int) -> Record:
    """Ten records a second: one in ten late in the second minute, one dropped each tenth second."""
    due = second + n / 10
    visits = {"first": StageVisit(variant_at(second), 3, 0.02, 0.05), "second": StageVisit("fast")}
    if n == 0 and second % 10 == 5:
        return Record(
            due, due, 0.4, RequestOutcome.DROPPED, "504", drop_stage="second", drop_reason="DeadlineUnreachable"
        )
    late = second >= 60 and n == 9
    outcome, latency = (RequestOutcome.LATE, 2.5) if late else (RequestOutcome.OK, 0.1 + n / 100)
    right = int(n != 1)
    return Record(due, due, latency, outcome, "200", correct=right, total=1, expected_accuracy=0.88, visits=visits)


def variant_at(second: int) -> str:
    return "slow" if 40 <= second < 80 else "fast"


def a_sample(second: int) -> Sample:
    stages = {
        "first": StageSample(variant_at(second), 8, 1 + (second >= 60), 3),
        "second": StageSample("fast", 4, 1, 0),
    }
    received = 10 * second
    counters = Counters(
        received=received,
        outcomes={**dict.fromkeys((end.word for end in RequestOutcome), 0), "ok": received},
        latency_buckets={0.1: 0.0, 0.5: received * 0.5, 2.0: float(received), float("inf"): float(received)},
        accuracy_sum=0.88 * received,
        accuracy_count=received,
    )
    return Sample(BEGAN + second, stages, 1.5 if second >= 60 else 1.0, 0.7, counters)


def plans() -> list[PipelinePlan]:
    changes = (("fast", 1, 0.0), ("slow", 2, 40.0), ("fast", 3, 80.0))
    found = []
    for variant, generation, at in changes:
        plan = echo_plan(variant, generation=generation)
        forecast = {"peakRps": 12.0, "source": "lstm"}
        why = {"change": f"to {variant} <because>"}
        spec = plan.spec.model_dump() | {"createdAt": BEGAN + at, "forecast": forecast, "explanation": why}
        found.append(PipelinePlan.model_validate(plan.model_dump() | {"spec": spec}))
    return found


def a_run(title: str = "made by hand", *, with_load: bool = True) -> Run:
    facts = RunFacts("sample", "constant:10", float(SECONDS), 2.0, ("first", "second"), BEGAN)
    records = [a_record(second, n) for second in range(SECONDS) for n in range(10)]
    results = Results.of(facts, records) if with_load else None
    faults = (Fault(BEGAN + 30, "replica first-0 ended", "last line: <nothing>"),)
    samples = [a_sample(int(second)) for second in np.arange(SECONDS + 1)]
    return Run(title, echo_pipeline(), samples, plans(), results, faults, 3.2)
