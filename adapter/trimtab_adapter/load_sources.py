"""Load sources: a router's load and state over HTTP. An error becomes an `ObservationError` that names the address."""

from typing import Protocol

import aiohttp

from trimtab_adapter.observation import Load, State, read_load, read_state
from trimtab_pipelines.router_state import ARRIVALS_PATH, HISTORY_SECONDS, STATE_PATH
from trimtab_predictor.metrics_client import get_json


class LoadSource(Protocol):
    """A source of the load."""

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:
        """Load of the last seconds, as far as it is known.

        Raises ObservationError if the load is missing, stale or out of range.
        """


class StateSource(LoadSource, Protocol):
    """A source of the load and of the routers' measurements."""

    async def state(self) -> State:
        """Service ratios, rows per request and the last minute's outcomes."""


class RouterSource:
    """One router's admin endpoints."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url.rstrip("/")

    async def load(self, now_seconds: float, seconds: int = HISTORY_SECONDS) -> Load:  # noqa: ARG002 (the router uses its own clock)
        return read_load(await get_json(self._session, f"{self._url}{ARRIVALS_PATH}", {"seconds": str(seconds)}))

    async def state(self) -> State:
        return read_state(await get_json(self._session, f"{self._url}{STATE_PATH}"))
