"""`OutputMonitor`: detects that the mix of classes in a stage's outputs has changed since its evidence was measured.

Confidences need not change with it, and neither need the accuracy; but the evidence is then of other rows. The distance
of two mixes is the total variation, half of the sum of absolute differences.
"""

import math

from trimtab_pipelines.stages import Stage
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.service_time import Key

DECAY_ROWS = 2000.0  # until a row weighs one third
MIN_ROWS = 500.0
MIN_DISTANCE = 0.1  # other variants of earlier stages change a mix by less than half of it


class OutputMonitor:
    """Monitor of the points of one stage with the shares of their classes."""

    def __init__(self, stage: Stage) -> None:
        self._shares = {
            (variant.name, point.name): shares
            for variant in stage.variants
            for point in variant.points
            if (shares := point.measured_accuracy().output_shares)
        }
        self._rows: dict[Key, dict[str, float]] = {}

    def observe(self, key: Key, classes: Array, weight: float) -> None:
        """Add first-pass rows of this weight each, by their class; those that the evidence lacks count as one."""
        shares = self._shares.get(key)
        if shares is None or not classes.size:
            return
        rows = self._rows.setdefault(key, {})
        kept = math.exp(-weight * classes.size / DECAY_ROWS)
        for name in rows:
            rows[name] *= kept
        for value in map(str, classes.ravel().tolist()):
            name = value if value in shares else ""
            rows[name] = rows.get(name, 0.0) + weight

    def changed(self) -> dict[Key, float]:
        """Return the distances of the mixes that have changed, beyond what the number of rows explains."""
        distances = {}
        for key, rows in self._rows.items():
            total, shares = sum(rows.values()), self._shares[key]
            names = rows.keys() | shares.keys()
            distance = sum(abs(rows.get(name, 0.0) / total - shares.get(name, 0.0)) for name in names) / 2
            if total >= MIN_ROWS and distance > MIN_DISTANCE + math.sqrt(len(shares) / total):
                distances[key] = round(distance, 3)
        return distances
