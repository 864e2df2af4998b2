"""Shell: where load and state come from, over HTTP. A failure becomes an ObservationError that names the address."""

from typing import Protocol

import httpx

from trimtab_adapter.observation import Load, ObservationError, State, read_load, read_state


class LoadSource(Protocol):
    """Whoever knows the load."""

    async def load(self, now_seconds: float) -> Load:
        """Return the recent load; raise ObservationError where it is missing, stale or absurd."""


class RouterSource:
    """The router's own addresses."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self._url = client, url.rstrip("/")

    async def load(self, now_seconds: float) -> Load:  # noqa: ARG002 (the router's own clock counts)
        """Return the arrivals the router counted."""
        return read_load(await get_json(self._client, f"{self._url}/trimtab/v1/load"))

    async def state(self) -> State:
        """Return the service ratios and rows per request the router measured."""
        return read_state(await get_json(self._client, f"{self._url}/trimtab/v1/state"))


async def get_json(client: httpx.AsyncClient, url: str, parameters: dict[str, str] | None = None) -> object:
    """Return the parsed answer of an address."""
    try:
        response = await client.get(url, params=parameters)
        response.raise_for_status()
        content: object = response.json()
    except httpx.HTTPStatusError as error:
        raise ObservationError(f"{url} answered {error.response.status_code}: {error.response.text[:120]}") from error
    except httpx.HTTPError as error:
        raise ObservationError(f"{url} cannot be reached: {type(error).__name__} {error}".rstrip()) from error
    except ValueError as error:
        raise ObservationError(f"{url} answered no JSON: {error}") from error
    return content
