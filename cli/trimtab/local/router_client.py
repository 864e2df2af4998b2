"""Shell: asks the router what runs, and reads its counters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.ends import End
from trimtab_pipelines.mistakes import Failed
from trimtab_pipelines.router_state import STATE_PATH, RouterState

TIMEOUT_SECONDS = 2.0


class RouterUnreachable(Failed):
    """The router did not answer, or answered nonsense."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The router's counters at one moment; all grow from the router's start.

    `latency_buckets` maps upper edges in seconds to how many answers took at most that; `callers_faults` are those of
    all requests that were refused or dropped by the caller's own doing.
    """

    received: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    latency_buckets: Mapping[float, float] = field(default_factory=dict)
    accuracy_sum: float = 0.0
    accuracy_count: int = 0
    callers_faults: int = 0
    pipeline: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text Prometheus would scrape."""
        received, accuracy_sum, accuracy_count, callers_faults, pipeline = 0, 0.0, 0, 0, ""
        outcomes, drops, buckets = dict.fromkeys((end.word for end in End), 0), {}, {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels, value = sample.labels, sample.value
                if sample.name == names.RECEIVED:
                    received, pipeline = int(value), labels.get("pipeline", "")
                elif sample.name == names.CALLERS_FAULTS:
                    callers_faults = int(value)
                elif sample.name == names.REQUESTS:
                    outcomes[labels["outcome"]] = int(value)
                elif sample.name == names.DROPS:
                    drops[f"{labels['stage']}: {labels['reason']}"] = int(value)
                elif sample.name == f"{names.LATENCY_SECONDS}_bucket":
                    buckets[float(labels["le"])] = value
                elif sample.name == f"{names.SERVED_ACCURACY}_sum":
                    accuracy_sum = value
                elif sample.name == f"{names.SERVED_ACCURACY}_count":
                    accuracy_count = int(value)
        return cls(received, outcomes, drops, buckets, accuracy_sum, accuracy_count, callers_faults, pipeline)


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
