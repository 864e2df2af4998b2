"""Run record of a simulation, for the same summary and report as a served run."""

from trimtab.local.counters import Counters
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


def simulated_run(title: str, load: str, scenario: Scenario, simulation: SimulationResult, started_at: float) -> Run:
    """Convert a simulation into a run whose second 0 is the Unix time `started_at`."""
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
        Fault(started_at + failure.at_seconds, f"replica of {failure.stage} lost")
        for failure in scenario.environment.failures
    ]
    return Run(
        title=title,
        pipeline=scenario.pipeline,
        samples=[_sample(second, started_at) for second in simulation.seconds],
        plans=simulation.plans,
        results=Results.of(facts, _records(simulation)),
        faults=tuple(faults),
    )


def _records(simulation: SimulationResult) -> list[Record]:
    columns = zip(
        simulation.arrivals_seconds.tolist(),
        simulation.latency_seconds.tolist(),
        map(RequestOutcome, simulation.outcomes.tolist()),
        simulation.accuracy.tolist(),
        simulation.variants,
        strict=True,
    )
    records = []
    for index, (arrival, latency, outcome, accuracy, variants) in enumerate(columns):
        drop_stage, drop_reason = simulation.reasons.get(index, ("", ""))
        records.append(
            Record(
                scheduled=arrival,
                sent=arrival,
                latency_seconds=latency,
                outcome=outcome,
                code=_CODES[outcome],
                expected_accuracy=accuracy,
                drop_stage=drop_stage,
                drop_reason=drop_reason,
                visits={stage: StageVisit(variant) for stage, variant in variants.items()},
            )
        )
    return records


def _sample(second: SecondSample, started_at: float) -> Sample:
    stages = {name: StageSample(*stage) for name, stage in second.stages.items()}
    outcomes = {outcome.word: second.outcomes[outcome] for outcome in RequestOutcome}
    served = {stage: {"/".join(key): count for key, count in rows.items()} for stage, (rows, _) in second.rows.items()}
    escalated = {
        stage: {" ".join(map("/".join, keys)): count for keys, count in rows.items()}
        for stage, (_, rows) in second.rows.items()
    }
    counters = Counters(second.received, outcomes, served_rows=served, escalated_rows=escalated)
    return Sample(started_at + second.at_seconds, stages, second.cores, 0.0, counters)
