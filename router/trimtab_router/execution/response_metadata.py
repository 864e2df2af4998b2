"""What served a request, as its answer tells it: each stage's variant and how, row by row where rows differ. Pure."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trimtab_protocol.extensions import PROVISIONAL, StageParameters, parameters_of
from trimtab_router.scheduling.stage_request import ServedRows


def response_accuracy(served: Mapping[str, Sequence[ServedRows]], rows_by_stage: Mapping[str, int]) -> float:
    """Expected accuracy of an answer: the product over its stages, the mean over a stage's rows.

    Args:
        served: what each stage's rows were served by.
        rows_by_stage: how many rows of it each stage had.
    """
    product = 1.0
    for stage, pieces in served.items():
        if len(pieces) == 1:
            product *= pieces[0].accuracy
        else:
            product *= sum(piece.rows * piece.accuracy for piece in pieces) / rows_by_stage[stage]
    return product


def response_parameters(
    served: Mapping[str, Sequence[ServedRows]], tasks: Mapping[str, str]
) -> dict[str, bool | str | int | float]:
    """The parameters of an answer: each stage's variant and how; of several batches the slowest.

    Args:
        served: what each stage's rows were served by.
        tasks: which task a stage answered for, where the request named one.
    """
    told: dict[str, bool | str | int | float] = {}
    for stage, pieces in served.items():
        slowest = max(pieces, key=lambda piece: piece.queue_seconds + piece.service_seconds)
        named = parameters_of(stage)
        told[named.variant] = slowest.variant
        told[named.operating_point] = slowest.operating_point
        told[named.batch_size] = slowest.batch_rows
        told[named.queue_seconds] = round(slowest.queue_seconds, 6)
        told[named.service_seconds] = round(slowest.service_seconds, 6)
        if stage in tasks:
            told[named.task] = tasks[stage]
        if len(pieces) > 1 or pieces[0].confidences is not None:
            told |= _row_by_row(named, pieces)
            if named.provisional in told:
                told[PROVISIONAL] = True
    return told


def _row_by_row(named: StageParameters, pieces: Sequence[ServedRows]) -> dict[str, str]:
    """What differs between the rows of a stage: which point, how certain, and whether a second look is owing."""
    told: dict[str, str] = {}
    if len({piece.operating_point for piece in pieces}) > 1:
        told[named.operating_points] = _listed((piece.operating_point, piece.rows) for piece in pieces)
    if all(piece.confidences is not None for piece in pieces):
        told[named.confidences] = ",".join(f"{c:.4g}" for piece in pieces for c in np.asarray(piece.confidences))
    if any(piece.provisional for piece in pieces):
        told[named.provisional] = _listed((str(piece.provisional).lower(), piece.rows) for piece in pieces)
    return told


def _listed(texts: Iterable[tuple[str, int]]) -> str:
    return ",".join(text for text, rows in texts for _ in range(rows))
