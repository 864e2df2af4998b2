"""Load sources: a router's load and state over HTTP. An error becomes an `ObservationError` that names the address."""

import json
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from typing import Protocol

import aiohttp

from trimtab_adapter.observation import Load, ObservationError, State, read_load, read_state
from trimtab_pipelines.router_state import ARRIVALS_PATH, HISTORY_SECONDS, STATE_PATH

MAX_BYTES = 8 * 2**20
"""Six hours of seconds are a hundred kilobytes; a much longer response is invalid."""
_SHOWN = 120


def open_session(timeout_seconds: float, *, tls: ssl.SSLContext | bool = True) -> aiohttp.ClientSession:
    """A session that limits each connection attempt and each read."""
    timeout = aiohttp.ClientTimeout(total=None, connect=timeout_seconds, sock_read=timeout_seconds)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=tls))


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


async def get_json(
    session: aiohttp.ClientSession,
    url: str,
    parameters: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> object:
    try:
        async with session.get(url, params=parameters, headers=headers, allow_redirects=False) as response:
            body = await _read_bounded(response, url)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ObservationError(
            f"{url} cannot be reached: {type(error).__name__} {error}".rstrip(), "Missing"
        ) from error
    if response.status != HTTPStatus.OK:
        shown = body[:_SHOWN].decode(errors="replace")
        raise ObservationError(f"{url} returned {response.status}: {shown}", "Missing")
    try:
        content: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ObservationError(f"{url} returned invalid JSON: {error}") from error
    return content


async def _read_bounded(response: aiohttp.ClientResponse, url: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BYTES:
            raise ObservationError(f"{url} returned more than {MAX_BYTES // 2**20} MiB")
    return bytes(body)
