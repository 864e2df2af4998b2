"""Refusals of a stage: messages and error codes."""

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.scheduling.stage_request import StageRequest


def too_many_rows(stage: str, rows: int, most: int) -> Refusal:
    return invalid(f"stage {stage}: {rows} rows in one request; send at most {most}")


def queue_full(stage: str, rows: int, most: int, wait_seconds: float) -> Refusal:
    return Refusal(
        ErrorCode.RESOURCE_EXHAUSTED,
        "QueueFull",
        f"stage {stage}: its queue holds {rows} rows of at most {most}; try again later",
        stage=stage,
        retry_after_seconds=max(wait_seconds, 1.0),
    )


def no_replica(stage: str, waited_seconds: float) -> Refusal:
    return Refusal(
        ErrorCode.UNAVAILABLE,
        "NoReplica",
        f"stage {stage}: no replica became ready while the request waited {waited_seconds:.3f} s",
        stage=stage,
        retry_after_seconds=1.0,
    )


def deadline_passed(stage: str, waited_seconds: float) -> Refusal:
    message = f"dropped at stage {stage}: its deadline passed after {waited_seconds:.3f} s in the queue"
    return Refusal(ErrorCode.DEADLINE_EXCEEDED, "DeadlineExpired", message, stage=stage)


def deadline_unreachable(
    request: StageRequest, now: float, *, wait_seconds: float, service_seconds: float, later_seconds: float
) -> Refusal:
    message = (
        f"dropped at stage {request.stage}: {request.deadline - now:.3f} s are left to its deadline, but it needs "
        f"{wait_seconds:.3f} s in the queue, {service_seconds:.3f} s in this stage and {later_seconds:.3f} s after it"
    )
    return Refusal(ErrorCode.DEADLINE_EXCEEDED, "DeadlineUnreachable", message, stage=request.stage)


def too_inaccurate(stage: str, floor: float, best: float) -> Refusal:
    message = (
        f"stage {stage}: its accuracy must be {floor:.4f} for the floor that the request wishes, but no operating "
        f"point of the plan in force gives more than {best:.4f}; lower the floor"
    )
    return Refusal(ErrorCode.INVALID_ARGUMENT, "AccuracyFloor", message, stage=stage)
