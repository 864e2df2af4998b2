"""`ConfidenceShifts`: expected changes of a stage's confidence by the variants that served earlier stages.

Evidence is measured with the best variants of earlier stages. A lighter detector, for example, finds more boxes without
an object, of which every classifier is less confident.
"""

from collections.abc import Iterable, Mapping, Sequence

from trimtab_pipelines.stages import Stage
from trimtab_router.scheduling.stage_request import ServedRows


class ConfidenceShifts:
    """Measured shifts of a pipeline's points."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._by_point = {
            (stage.name, variant.name, point.name): shifts
            for stage in stages
            for variant in stage.variants
            for point in variant.points
            if (shifts := point.measured_accuracy().confidence_shifts)
        }

    def of(self, stage: str, served: Mapping[str, Sequence[ServedRows]]) -> float:
        """Return the shift of a stage's rows, the mean over the rows of each earlier stage that serves them."""
        total = 0.0
        for earlier, results in served.items() if self._by_point else ():
            shifts = [self._by_point.get((earlier, each.variant, each.operating_point), {}) for each in results]
            rows = sum(each.rows for each in results)
            total += sum(s.get(stage, 0.0) * each.rows for s, each in zip(shifts, results, strict=True)) / max(rows, 1)
        return total
