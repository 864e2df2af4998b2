"""Asks each router of a pipeline itself. Their addresses come from the EndpointSlices of the router's Service.

A router that is ready and does not answer is left out, and the sum says so: it may be too low. What a router that is
gone had counted goes on counting in the past, so that replacing a router does not look like a load that vanished.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx

from trimtab_adapter.cluster.cluster_cache import SLICE, ClusterCache
from trimtab_adapter.load_sources import RouterSource
from trimtab_adapter.observation import Load, ObservationError, State, merge_states
from trimtab_kubernetes.endpoint_slices import parse_endpoint_slice
from trimtab_kubernetes.objects import Key, Object
from trimtab_pipelines.kubernetes_names import ADMIN_PORT_NAME, ROUTER_ADMIN_PORT, router_admin_name
from trimtab_pipelines.router_state import HISTORY_SECONDS
from trimtab_predictor.context import MEMORY_SECONDS

Answer = TypeVar("Answer", Load, State)


@dataclass(frozen=True, slots=True)
class Address:
    """A router, and whether it ought to answer: one that is ending need not."""

    url: str
    ready: bool


class RouterMetricsSource:
    """All routers of one pipeline."""

    def __init__(self, client: httpx.AsyncClient, cache: ClusterCache, key: Key) -> None:
        self._client, self._cache, self._key = client, cache, key
        self._last: dict[str, Load] = {}  # by address, on our own clock

    def ready(self) -> int:
        """How many routers ought to answer."""
        return sum(address.ready for address in self._addresses())

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:
        """The arrivals all routers counted; raise ObservationError where none answers."""
        answers = await self._ask(seconds)
        loads = {url: Load(now_seconds, answer.history_rps) for url, answer in answers.items() if answer is not None}
        missing = [url for url, answer in answers.items() if answer is None]
        self._last = recent({**self._last, **loads}, now_seconds)
        merged = merge_loads(self._last.values(), now_seconds)
        return Load(now_seconds, merged, f"no answer from {', '.join(missing)}" if missing else "")

    async def state(self) -> State:
        """What all routers measured; raise ObservationError where none answers."""
        sources = [RouterSource(self._client, address.url) for address in self._addresses()]
        found = await asyncio.gather(*(source.state() for source in sources), return_exceptions=True)
        states = [state for state in found if isinstance(state, State)]
        if sources and not states:
            raise next(error for error in found if isinstance(error, BaseException))
        return merge_states(states)

    async def _ask(self, seconds: int) -> dict[str, Load | None]:
        """Each answer, None for a router that ought to have answered; raise where no ready one did."""
        asked = self._addresses()
        if not any(address.ready for address in asked):
            name = f"{self._key[0]}/{router_admin_name(self._key[1])}"
            raise ObservationError(f"no router is ready behind Service {name}", "Missing")
        sources = [RouterSource(self._client, address.url) for address in asked]
        found = await asyncio.gather(*(source.load(0.0, seconds) for source in sources), return_exceptions=True)
        answers: dict[str, Load | None] = {}
        errors: list[BaseException] = []
        for address, answer in zip(asked, found, strict=True):
            if isinstance(answer, Load):
                answers[address.url] = answer
            elif not isinstance(answer, ObservationError) or (address.ready and answer.fault != "Missing"):
                raise answer
            elif address.ready:
                answers[address.url] = None
                errors.append(answer)
        if all(answer is None for answer in answers.values()):
            raise errors[0]
        return answers

    def _addresses(self) -> list[Address]:
        return addresses(self._cache.owned_by(SLICE, self._key[0], router_admin_name(self._key[1])))


def addresses(slices: Iterable[Object]) -> list[Address]:
    """The administrative addresses of all routers that serve, those that are ending included; each once."""
    found: dict[str, bool] = {}
    for one in map(parse_endpoint_slice, slices):
        port = one.ports.get(ADMIN_PORT_NAME, ROUTER_ADMIN_PORT)
        for router in one.backends:
            if router.ready or router.serving:
                url = f"http://{router.host}:{port}"
                found[url] = router.ready or found.get(url, False)
    return [Address(url, ready) for url, ready in sorted(found.items())]


def recent(loads: Mapping[str, Load], now_seconds: float) -> dict[str, Load]:
    """Leave out what ended before the history begins."""
    return {url: load for url, load in loads.items() if load.now_seconds > now_seconds - HISTORY_SECONDS}


def merge_loads(loads: Iterable[Load], now_seconds: float) -> tuple[float, ...]:
    """Sum arrivals second by second, each history ending where it was taken; before it began a router counted none.

    Six hours at most, as long as any router was asked for.
    """
    aged = [(max(0, math.floor(now_seconds) - math.floor(load.now_seconds)), load.history_rps) for load in loads]
    longest = min(max((ago + len(history_rps) for ago, history_rps in aged), default=0), MEMORY_SECONDS)
    total = [0.0] * longest
    for ago, history_rps in aged:
        for n, rps in enumerate(history_rps, longest - ago - len(history_rps)):
            if n >= 0:
                total[n] += rps
    return tuple(total) or (0.0,)
