"""Shell: asks the router what runs, and reads its counters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import STATE_PATH, RouterState

TIMEOUT_SECONDS = 2.0
_BUCKETS = tuple(f"{name}_bucket" for name in (names.LATENCY_SECONDS, names.TTFT_SECONDS, names.TBT_SECONDS))


class RouterUnreachable(OperationFailed):
    """The router did not answer, or answered nonsense."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The router's counters at one moment; all grow from the router's start.

    `latency_buckets` maps upper edges in seconds to how many answers took at most that; `client_errors` are those of
    all requests that were refused or dropped by the caller's own doing. Of answers that are written piece by piece,
    `first_token_buckets` and `next_token_buckets` map the modality to how many began within so many seconds, and how many pieces
    came within so many seconds of the one before; empty where none is.
    """

    received: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    latency_buckets: Mapping[float, float] = field(default_factory=dict)
    accuracy_sum: float = 0.0
    accuracy_count: int = 0
    client_errors: int = 0
    pipeline: str = ""
    first_token_buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    next_token_buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text Prometheus would scrape."""
        received, accuracy_sum, accuracy_count, client_errors, pipeline = 0, 0.0, 0, 0, ""
        outcomes, drops = dict.fromkeys((end.word for end in RequestOutcome), 0), {}
        buckets: dict[str, dict[str, dict[float, float]]] = {name: {} for name in _BUCKETS}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels, value = sample.labels, sample.value
                if sample.name == names.RECEIVED:
                    received, pipeline = int(value), labels.get("pipeline", "")
                elif sample.name == names.CLIENT_ERRORS:
                    client_errors = int(value)
                elif sample.name == names.REQUESTS:
                    outcomes[labels["outcome"]] = int(value)
                elif sample.name == names.DROPS:
                    drops[f"{labels['stage']}: {labels['reason']}"] = int(value)
                elif sample.name in buckets:
                    buckets[sample.name].setdefault(labels.get("modality", ""), {})[float(labels["le"])] = value
                elif sample.name == f"{names.EXPECTED_ACCURACY}_sum":
                    accuracy_sum = value
                elif sample.name == f"{names.EXPECTED_ACCURACY}_count":
                    accuracy_count = int(value)
        latency, first, following = (buckets[name] for name in _BUCKETS)
        return cls(
            received,
            outcomes,
            drops,
            latency.get("", {}),
            accuracy_sum,
            accuracy_count,
            client_errors,
            pipeline,
            _seen(first),
            _seen(following),
        )


def _seen(buckets: Mapping[str, Mapping[float, float]]) -> dict[str, Mapping[float, float]]:
    """Those modalities of which there was anything."""
    return {modality: edges for modality, edges in buckets.items() if edges.get(math.inf)}


def quantile_upper_bound(buckets: Mapping[float, float], quantile: float) -> float | None:
    """The edge of the bucket that a quantile fell into: this share took at most so long; None where nothing is."""
    edges = sorted(buckets)
    if not edges or buckets[edges[-1]] <= 0:
        return None
    return next(edge for edge in edges if buckets[edge] >= quantile * buckets[edges[-1]])


def median_and_p99(buckets: Mapping[float, float]) -> tuple[float, float]:
    """Median and p99 by the edges of their buckets, in seconds; NaN where nothing is."""
    p50, p99 = (quantile_upper_bound(buckets, quantile) for quantile in (0.5, 0.99))
    return math.nan if p50 is None else p50, math.nan if p99 is None else p99


class RouterClient:
    """One router, by its administrative port."""

    def __init__(self, admin_port: int, host: str = "127.0.0.1") -> None:
        self.url = f"http://{host}:{admin_port}"
        self._client = httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_SECONDS, trust_env=False)

    async def state(self) -> RouterState:
        """What runs now."""
        body = (await self._get(STATE_PATH)).content
        try:
            return RouterState.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            wrong = ".".join(map(str, first["loc"])) or "answer"
            message = f"{self.url}{STATE_PATH} is no state; is this a Trimtab router? {wrong}: {first['msg']}"
            raise RouterUnreachable(message) from error

    async def counters(self) -> Counters:
        """Its counters now."""
        return Counters.parse((await self._get("/metrics")).text)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def _get(self, path: str) -> httpx.Response:
        try:
            response = await self._client.get(path)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise RouterUnreachable(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        return response
