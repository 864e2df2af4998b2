"""Load of a third-party server, read from its Prometheus metrics."""

import re
from functools import lru_cache

from trimtab_pipelines.engines import LoadMetrics
from trimtab_router.scheduling.replica_slots import EngineLoad

_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{0,18})?(?:e[+-]?[0-9]{1,2})?)"


def parse_engine_load(text: bytes, metrics: LoadMetrics) -> EngineLoad | None:
    """Sum each metric over its labels, of the usage the highest; None if the server does not report its queue."""
    values: dict[str, list[float]] = {}
    for name, value in _pattern(metrics).findall(text):
        values.setdefault(name.decode(), []).append(float(value))
    if metrics.waiting not in values:
        return None
    waiting, running, preemptions = (
        sum(values.get(name, ())) for name in (metrics.waiting, metrics.running, metrics.preemptions)
    )
    return EngineLoad(waiting, running, max(values.get(metrics.cache_usage, (0.0,))), preemptions)


@lru_cache(16)
def _pattern(metrics: LoadMetrics) -> re.Pattern[bytes]:
    """Samples of the metrics, with or without labels; others than finite positive numbers are skipped."""
    names = filter(None, (metrics.waiting, metrics.running, metrics.cache_usage, metrics.preemptions))
    either = "|".join(map(re.escape, names))
    return re.compile(rf"^({either})(?:\{{[^}}\n]*\}})?[ \t]+{_NUMBER}(?=\s|$)".encode(), re.MULTILINE)
