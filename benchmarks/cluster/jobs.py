"""Jobs of digits-av with and without a sense or a floor: asked at any door, and what is wrong with their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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

ROWS: Final = 8
TIMES: Final = 3
PATIENCE_SECONDS: Final = 30.0
OUTPUTS: Final = ("digit", "confidence")


@dataclass(frozen=True, slots=True)
class Job:
    """What one lacks, and the accuracy it asks for."""

    lacks: frozenset[str] = frozenset()
    floor: float = 0.0


JOBS: Final = (
    Job(),
    Job(floor=0.85),
    Job(frozenset({"audio"}), 0.8),
    Job(frozenset({"video"}), 0.7),
    Job(frozenset({"text"})),
    Job(frozenset({"audio", "video"})),
)


@dataclass(frozen=True, slots=True)
class Met:
    """What came of all jobs: how many, rows, those answered rightly, which points served them, and what was wrong."""

    jobs: int
    rows: int
    right: int
    points: frozenset[str]
    faults: tuple[str, ...]


async def asked(wire: RestClient, stage: Stage, planned: Sequence[str]) -> Met:
    """Ask all jobs, a few times each, one after the other.

    Args:
        wire: to the door.
        stage: of digits-av.
        planned: the operating points that the plan allows.
    """
    source, right, points, faults = DigitsAvPayloads(11, JobOptions(rows=(ROWS, ROWS), pool=400)), 0, set[str](), []
    jobs = JOBS * TIMES
    for number, job in enumerate(jobs):
        drawn = source.payload(number)
        inputs = tuple(tensor for tensor in drawn.inputs if tensor.name not in job.lacks)
        wishes = {"timeout": round(PATIENCE_SECONDS * 1e6)} | ({ACCURACY_FLOOR: job.floor} if job.floor else {})
        answer = await wire.send(wire.encode(inputs, OUTPUTS, wishes))
        if answer.message is None:
            faults.append(f"{job}: {answer.code} {answer.detail}")
            continue
        right += source.score(drawn.truth, {one.name: one.array for one in answer.message.outputs}).correct
        found, wrong = judged(job, stage, planned, answer.message.parameters)
        points |= found
        faults += wrong
    return Met(len(jobs), ROWS * len(jobs), right, frozenset(points), tuple(faults))


def judged(job: Job, stage: Stage, planned: Sequence[str], told: Parameters) -> tuple[set[str], list[str]]:
    """The points that served a job, by what its answer tells, and what cannot be right about it."""
    named = parameters_of(stage.name)
    points = _by_row(told, named.operating_points) or [str(told.get(named.operating_point))] * ROWS
    faults = [f"rows at {point}, which the plan has not" for point in sorted(set(points) - set(planned))]
    for point in sorted(set(points) & set(planned)):
        reads = stage.variants[0].point(point).modalities or tuple(i.name for i in stage.inputs)
        faults += [f"rows at {point} without {sense}" for sense in reads if sense in job.lacks]
    sure = [parse_number(each) for each in _by_row(told, named.confidences)]
    if len(sure) != ROWS or not all(each is not None and 0.0 <= each <= 1.0 for each in sure):
        faults.append(f"{ROWS} rows, but confidences {told.get(named.confidences)!r}")
    owing = _by_row(told, named.escalation_pending)
    if bool(told.get(ESCALATION_PENDING)) != ("true" in owing) or len(owing) not in {0, ROWS}:
        faults.append(f"provisional {told.get(ESCALATION_PENDING)!r}, but by row {owing}")
    expected = parse_number(told.get(EXPECTED_ACCURACY))
    if not told.get(ESCALATION_PENDING) and (expected is None or expected < job.floor - 1e-6):
        faults.append(f"expected accuracy {expected}, below the floor")
    return set(points), [f"{job}: {fault}" for fault in faults]


def _by_row(told: Mapping[str, object], name: str) -> list[str]:
    return str(told[name]).split(",") if name in told else []
