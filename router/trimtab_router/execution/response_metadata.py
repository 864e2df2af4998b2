"""Response parameters that describe how a request was served, row by row where rows differ."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trimtab_protocol.extensions import ESCALATION_PENDING, StageParameters, parameters_of
from trimtab_router.scheduling.stage_request import ServedRows


def response_accuracy(served: Mapping[str, Sequence[ServedRows]], rows_by_stage: Mapping[str, int]) -> float:
    """Expected accuracy of a response: the product over its stages of the mean over the stage's rows."""
    product = 1.0
    for stage, results in served.items():
        if len(results) == 1:
            product *= results[0].accuracy
        else:
            product *= sum(rows.rows * rows.accuracy for rows in results) / rows_by_stage[stage]
    return product


def response_parameters(
    served: Mapping[str, Sequence[ServedRows]], tasks: Mapping[str, str]
) -> dict[str, bool | str | int | float]:
    """Variant, point, times and named task of each stage. Of several batches, the slowest counts."""
    parameters: dict[str, bool | str | int | float] = {}
    for stage, results in served.items():
        slowest = max(results, key=lambda rows: rows.queue_seconds + rows.service_seconds)
        keys = parameters_of(stage)
        parameters[keys.variant] = slowest.variant
        parameters[keys.operating_point] = slowest.operating_point
        parameters[keys.batch_size] = slowest.batch_rows
        parameters[keys.queue_seconds] = round(slowest.queue_seconds, 6)
        parameters[keys.service_seconds] = round(slowest.service_seconds, 6)
        if stage in tasks:
            parameters[keys.task] = tasks[stage]
        if len(results) > 1 or results[0].confidences is not None:
            parameters |= _row_by_row(keys, results)
            if keys.escalation_pending in parameters:
                parameters[ESCALATION_PENDING] = True
    return parameters


def _row_by_row(keys: StageParameters, results: Sequence[ServedRows]) -> dict[str, str]:
    """Values that differ between the rows of a stage: operating point, confidence, pending escalation."""
    parameters: dict[str, str] = {}
    if len({rows.operating_point for rows in results}) > 1:
        parameters[keys.operating_points] = _repeat((rows.operating_point, rows.rows) for rows in results)
    if all(rows.confidences is not None for rows in results):
        parameters[keys.confidences] = ",".join(f"{c:.4g}" for rows in results for c in np.asarray(rows.confidences))
    if any(rows.escalation_pending for rows in results):
        parameters[keys.escalation_pending] = _repeat(
            (str(rows.escalation_pending).lower(), rows.rows) for rows in results
        )
    return parameters


def _repeat(values: Iterable[tuple[str, int]]) -> str:
    return ",".join(value for value, count in values for _ in range(count))
