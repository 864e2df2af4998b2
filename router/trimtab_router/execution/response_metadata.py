"""Response parameters that describe how a request was served, row by row where rows differ."""

from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage
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
        slowest = results[0]
        if len(results) > 1:
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
    parameters: dict[str, str] = {}
    if len({rows.variant for rows in results}) > 1:
        parameters[keys.variants] = _repeat((rows.variant, rows.rows) for rows in results)
    if len({rows.operating_point for rows in results}) > 1:
        parameters[keys.operating_points] = _repeat((rows.operating_point, rows.rows) for rows in results)
    if all(rows.confidences is not None for rows in results):
        parameters[keys.confidences] = ",".join(f"{c:.4g}" for rows in results for c in np.asarray(rows.confidences))
    for name, values in (
        (keys.escalated, [rows.escalated for rows in results]),
        (keys.escalation_pending, [rows.escalation_pending for rows in results]),
    ):
        if any(values):
            parameters[name] = _repeat(
                (str(value).lower(), rows.rows) for value, rows in zip(values, results, strict=True)
            )
    return parameters


def _repeat(values: Iterable[tuple[str, int]]) -> str:
    return ",".join(value for value, count in values for _ in range(count))


class StreamTiming:
    """Chunk times of one request, on the clock of its arrival. Several rows may be generated concurrently."""

    __slots__ = ("_arrived_at", "_first", "_latest", "_tokens", "gaps", "images", "time_to_first_token", "usage")

    def __init__(self, arrived_at: float, images: int = 0) -> None:
        self.images = images
        self.time_to_first_token: float | None = None  # seconds from arrival to the first chunk, None before it
        self.gaps = array("d")  # seconds between consecutive chunks of a row
        self.usage: dict[int, Usage] = {}  # token counts of each completed row
        self._arrived_at = arrived_at
        self._first: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def record(self, row: int, chunk: Chunk | LastChunk, now: float) -> None:
        if isinstance(chunk, LastChunk):
            self.usage[row] = chunk.usage
        if row not in self._first:
            self._first[row] = now
            self.time_to_first_token = (
                now - self._arrived_at if self.time_to_first_token is None else self.time_to_first_token
            )
        elif not isinstance(chunk, LastChunk):
            self.gaps.append(now - self._latest[row])
        if not isinstance(chunk, LastChunk):
            self._tokens[row] = self._tokens.get(row, 0) + chunk.tokens
            self._latest[row] = now

    @property
    def time_per_output_token(self) -> float:
        spans = (
            (self._latest[row] - first) / (self._tokens[row] - 1)
            for row, first in self._first.items()
            if self._tokens.get(row, 0) > 1
        )
        return max(spans, default=0.0)

    def meets(self, slo: ServiceLevel) -> bool:
        late = (
            slo.time_to_first_token_seconds is not None
            and (self.time_to_first_token or 0.0) > slo.time_to_first_token_seconds
        )
        slow = (
            slo.time_per_output_token_seconds is not None
            and self.time_per_output_token > slo.time_per_output_token_seconds
        )
        return not (late or slow)
