"""Jobs of digits-av with and without a modality or a floor, and the checks of their responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_loadtester.clients import RestClient
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_pipelines.stages import Stage
from trimtab_protocol import Parameters
from trimtab_protocol.extensions import (
    ACCURACY_FLOOR,
    ESCALATION_PENDING,
    EXPECTED_ACCURACY,
    parameters_of,
    parse_number,
)

ROWS, TIMES = 8, 3
TIMEOUT_MICROSECONDS = 30_000_000
OUTPUTS = ("digit", "confidence")
MIN_RIGHT_SHARE = 0.55
"""Of rows, a third of whose jobs lack the most informative modality; chance is a tenth."""


@dataclass(frozen=True, slots=True)
class Job:
    """The modalities that a job lacks, and its accuracy floor."""

    lacks: frozenset[str] = frozenset()
    floor: float = 0.0


JOBS = (
    Job(),
    Job(floor=0.85),
    Job(frozenset({"audio"}), 0.8),
    Job(frozenset({"video"}), 0.7),
    Job(frozenset({"text"})),
    Job(frozenset({"audio", "video"})),
)


@dataclass(slots=True)
class JobResults:
    """Rows, those answered rightly, the operating points that served them, and invalid responses."""

    rows: int = 0
    right: int = 0
    points: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


async def run_jobs(client: RestClient, stage: Stage, planned: Sequence[str]) -> JobResults:
    """Run all jobs some times, one after the other.

    Args:
        client: of digits-av.
        stage: its stage.
        planned: the operating points that the plan allows.
    """
    source, results = DigitsAvPayloads(11, JobOptions(rows=(ROWS, ROWS), pool=400)), JobResults()
    for number, job in enumerate(JOBS * TIMES):
        payload = source.payload(number)
        inputs = tuple(tensor for tensor in payload.inputs if tensor.name not in job.lacks)
        parameters = {"timeout": TIMEOUT_MICROSECONDS} | ({ACCURACY_FLOOR: job.floor} if job.floor else {})
        response = await client.send(client.encode(inputs, OUTPUTS, parameters))
        results.rows += ROWS
        if response.message is None:
            results.faults.append(f"{job}: {response.code} {response.detail}")
            continue
        outputs = {output.name: output.array for output in response.message.outputs}
        results.right += source.score(payload.truth, outputs).correct
        points, faults = check_response(job, stage, planned, response.message.parameters)
        results.points |= points
        results.faults += faults
    return results


def check_response(
    job: Job, stage: Stage, planned: Sequence[str], parameters: Parameters
) -> tuple[set[str], list[str]]:
    """The operating points that served a job, and contradictions in its response."""
    names = parameters_of(stage.name)
    points = _by_row(parameters, names.operating_points) or [str(parameters.get(names.operating_point))] * ROWS
    faults = [f"rows at {point}, which the plan does not have" for point in sorted(set(points) - set(planned))]
    for point in sorted(set(points) & set(planned)):
        reads = stage.variants[0].point(point).modalities or tuple(i.name for i in stage.inputs)
        faults += [f"rows at {point} without {modality}" for modality in reads if modality in job.lacks]
    confidences = [parse_number(value) for value in _by_row(parameters, names.confidences)]
    if len(confidences) != ROWS or not all(value is not None and 0.0 <= value <= 1.0 for value in confidences):
        faults.append(f"{ROWS} rows, but confidences {parameters.get(names.confidences)!r}")
    pending = _by_row(parameters, names.escalation_pending)
    if bool(parameters.get(ESCALATION_PENDING)) != ("true" in pending) or len(pending) not in {0, ROWS}:
        faults.append(f"escalation pending {parameters.get(ESCALATION_PENDING)!r}, but by row {pending}")
    expected = parse_number(parameters.get(EXPECTED_ACCURACY))
    if not parameters.get(ESCALATION_PENDING) and (expected is None or expected < job.floor - 1e-6):
        faults.append(f"expected accuracy {expected}, below the floor")
    return set(points), [f"{job}: {fault}" for fault in faults]


def _by_row(parameters: Mapping[str, object], name: str) -> list[str]:
    return str(parameters[name]).split(",") if name in parameters else []
