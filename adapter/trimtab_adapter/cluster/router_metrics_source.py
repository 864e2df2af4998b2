"""`RouterMetricsSource`: load and state of each router of a pipeline, by the EndpointSlices of the router's Service.

A ready router without a response is left out, and the load says that it may be too low. The arrivals of a router that
is gone still count in the past, so that replacing a router does not look like vanished load.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp

from trimtab_adapter.cluster.config_source import SLICE, ClusterCache
from trimtab_adapter.load_sources import RouterSource
from trimtab_adapter.observation import Load, State, merge_states
from trimtab_kubernetes.endpoint_slices import parse_endpoint_slice
from trimtab_kubernetes.objects import Key, Object
from trimtab_pipelines.kubernetes_names import ADMIN_PORT_NAME, ROUTER_ADMIN_PORT, router_admin_name
from trimtab_pipelines.router_state import HISTORY_SECONDS
from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_predictor.load_history import ObservationError


@dataclass(frozen=True, slots=True)
class Address:
    """A router's URL, and whether it must respond: a terminating router need not."""

    url: str
    ready: bool


class RouterMetricsSource:
    """All routers of one pipeline."""

    def __init__(self, session: aiohttp.ClientSession, cache: ClusterCache, key: Key) -> None:
        self._session, self._cache, self._key = session, cache, key
        self._last: dict[str, Load] = {}  # by address, on our own clock

    def ready(self) -> int:
        return sum(address.ready for address in self._addresses())

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:
        """The arrivals of all routers; raise ObservationError if none responds."""
        answers = await self._fetch_loads(seconds)
        loads = {url: Load(now_seconds, answer.history_rps) for url, answer in answers.items() if answer is not None}
        missing = [url for url, answer in answers.items() if answer is None]
        recent = {url: load for url, load in self._last.items() if load.now_seconds > now_seconds - HISTORY_SECONDS}
        self._last = recent | loads
        merged = merge_loads(self._last.values(), now_seconds)
        sliding_rps = math.fsum(answer.sliding_rps for answer in answers.values() if answer is not None)
        return Load(now_seconds, merged, f"no response from {', '.join(missing)}" if missing else "", sliding_rps)

    async def state(self) -> State:
        """The merged state of all routers; raise ObservationError if none responds."""
        sources = [RouterSource(self._session, address.url) for address in self._addresses()]
        found = await asyncio.gather(*(source.state() for source in sources), return_exceptions=True)
        states = [state for state in found if isinstance(state, State)]
        if sources and not states:
            raise next(error for error in found if isinstance(error, BaseException))
        return merge_states(states)

    async def _fetch_loads(self, seconds: int) -> dict[str, Load | None]:
        """Each router's load, None for a ready one without a response; raise if no ready one responded."""
        routers = self._addresses()
        if not any(address.ready for address in routers):
            name = f"{self._key[0]}/{router_admin_name(self._key[1])}"
            raise ObservationError(f"no router is ready behind Service {name}", "Missing")
        sources = [RouterSource(self._session, address.url) for address in routers]
        found = await asyncio.gather(*(source.load(0.0, seconds) for source in sources), return_exceptions=True)
        answers: dict[str, Load | None] = {}
        errors: list[BaseException] = []
        for address, answer in zip(routers, found, strict=True):
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
    """The admin addresses of all serving routers, terminating ones included; each once."""
    ready_by_url: dict[str, bool] = {}
    for endpoint_slice in map(parse_endpoint_slice, slices):
        port = endpoint_slice.ports.get(ADMIN_PORT_NAME, ROUTER_ADMIN_PORT)
        for router in endpoint_slice.backends:
            if router.ready or router.serving:
                url = f"http://{router.host}:{port}"
                ready_by_url[url] = router.ready or ready_by_url.get(url, False)
    return [Address(url, ready) for url, ready in sorted(ready_by_url.items())]


def merge_loads(loads: Iterable[Load], now_seconds: float) -> tuple[float, ...]:
    """Sum arrivals second by second, six hours at most, each history ending when it was read."""
    aged = [(max(0, math.floor(now_seconds) - math.floor(load.now_seconds)), load.history_rps) for load in loads]
    longest = min(max((ago + len(history_rps) for ago, history_rps in aged), default=0), MEMORY_SECONDS)
    total = [0.0] * longest
    for ago, history_rps in aged:
        for n, rps in enumerate(history_rps, longest - ago - len(history_rps)):
            if n >= 0:
                total[n] += rps
    return tuple(total) or (0.0,)
