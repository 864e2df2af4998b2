"""Client of a router's admin port."""

import aiohttp
from pydantic import ValidationError

from trimtab.local.counters import Counters
from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.router_state import STATE_PATH, RouterState

TIMEOUT_SECONDS = 2.0


class RouterUnreachable(OperationFailed):
    """The router did not respond, or with an invalid response."""


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
