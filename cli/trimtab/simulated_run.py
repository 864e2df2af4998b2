"""A simulation as a run: the same summary, record and report as of a served one. Pure."""

from collections.abc import Mapping

from trimtab.local.router_client import Counters
from trimtab.local.supervisor import Fault
from trimtab.run_samples import Run, Sample, StageSample
from trimtab_adapter.simulation.result import SecondSample, SimulationResult
from trimtab_adapter.simulation.simulator import Scenario
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.request_outcome import RequestOutcome

_CODES = {
    RequestOutcome.OK: "200",
    RequestOutcome.LATE: "200",
    RequestOutcome.DROPPED: "504",
    RequestOutcome.REFUSED: "429",
    RequestOutcome.FAILED: "500",
}


def run_of(title: str, load: str, scenario: Scenario, found: SimulationResult, started_at: float) -> Run:
    """The run that would have been recorded; `started_at` is the Unix time its second 0 stands for."""
    spec = scenario.pipeline.spec
    facts = RunFacts(
        pipeline=scenario.pipeline.name,
        load=load,
        duration_seconds=scenario.duration_seconds,
        slo_seconds=spec.slo.latency_seconds,
        stages=tuple(stage.name for stage in spec.ordered_stages),
        started_at=started_at,
    )
    faults = [
        Fault(started_at + f.at_seconds, f"a replica of {f.stage} was lost") for f in scenario.environment.failures
    ]
    return Run(
        title=title,
        pipeline=scenario.pipeline,
        samples=[_sample(second, started_at) for second in found.seconds],
        plans=found.plans,
        results=Results.of(facts, _records(found)),
        faults=tuple(faults),
    )


def _records(found: SimulationResult) -> list[Record]:
    columns = zip(
        found.arrivals_seconds.tolist(),
        found.latency_seconds.tolist(),
        found.outcomes.tolist(),
        found.accuracy.tolist(),
        found.variants,
        strict=True,
    )
    return [
        _record(at, latency, RequestOutcome(end), accuracy, variants, found.reasons.get(index, ("", "")))
        for index, (at, latency, end, accuracy, variants) in enumerate(columns)
    ]


def _record(
    at: float, latency: float, end: RequestOutcome, accuracy: float, variants: Mapping[str, str], why: tuple[str, str]
) -> Record:
    stage, reason = why
    return Record(
        scheduled=at,
        sent=at,
        latency_seconds=latency,
        outcome=end,
        code=_CODES[end],
        expected_accuracy=accuracy,
        drop_stage=stage,
        drop_reason=reason,
        visits={stage: StageVisit(variant) for stage, variant in variants.items()},
    )


def _sample(second: SecondSample, started_at: float) -> Sample:
    stages = {name: StageSample(*stage) for name, stage in second.stages.items()}
    outcomes = {end.word: second.outcomes[end] for end in RequestOutcome}
    counters = Counters(received=second.received, outcomes=outcomes)
    return Sample(started_at + second.at_seconds, stages, second.cores, 0.0, counters)
