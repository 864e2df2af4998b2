"""Client of a router's admin port: its state and its counters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import STATE_PATH, RouterState

TIMEOUT_SECONDS = 2.0
_BUCKETS = tuple(f"{name}_bucket" for name in (names.LATENCY_SECONDS, names.TTFT_SECONDS, names.TBT_SECONDS))


class RouterUnreachable(OperationFailed):
    """The router did not respond, or with an invalid response."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a router since its start.

    Buckets map upper edges in seconds to cumulative counts, as in Prometheus.
    """

    received: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    latency_buckets: Mapping[float, float] = field(default_factory=dict)
    accuracy_sum: float = 0.0
    accuracy_count: int = 0
    client_errors: int = 0
    """Requests rejected or dropped because of the client."""
    pipeline: str = ""
    first_token_buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Times to first token, by modality."""
    next_token_buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Times between tokens, by modality."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text format of Prometheus."""
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
            _nonempty(first),
            _nonempty(following),
        )


def _nonempty(buckets: Mapping[str, Mapping[float, float]]) -> dict[str, Mapping[float, float]]:
    return {modality: edges for modality, edges in buckets.items() if edges.get(math.inf)}


def quantile_upper_bound(buckets: Mapping[float, float], quantile: float) -> float | None:
    """Upper edge of the bucket that holds a quantile; None if the buckets are empty."""
    edges = sorted(buckets)
    if not edges or buckets[edges[-1]] <= 0:
        return None
    return next(edge for edge in edges if buckets[edge] >= quantile * buckets[edges[-1]])


def median_and_p99(buckets: Mapping[float, float]) -> tuple[float, float]:
    """Upper bounds of median and p99 in seconds; NaN if the buckets are empty."""
    p50, p99 = (quantile_upper_bound(buckets, quantile) for quantile in (0.5, 0.99))
    return math.nan if p50 is None else p50, math.nan if p99 is None else p99


class RouterClient:
    """Client of a router's admin port."""

    def __init__(self, admin_port: int, host: str = "127.0.0.1") -> None:
        self.url = f"http://{host}:{admin_port}"
        self._session: aiohttp.ClientSession | None = None

    async def state(self) -> RouterState:
        body = await self._get(STATE_PATH)
        try:
            return RouterState.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field_path = ".".join(map(str, first["loc"])) or "response"
            message = f"{self.url}{STATE_PATH}: not a Trimtab router's state: {field_path}: {first['msg']}"
            raise RouterUnreachable(message) from error

    async def counters(self) -> Counters:
        return Counters.parse((await self._get("/metrics")).decode())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _get(self, path: str) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        try:
            async with self._session.get(f"{self.url}{path}", raise_for_status=True) as response:
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RouterUnreachable(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
