"""HTTP client of load metrics: JSON of a router, and series of a Prometheus server; an error names the address."""

import json
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp
from pydantic import BaseModel, ValidationError

from trimtab_pipelines.documents import DocumentError
from trimtab_predictor.load_history import ObservationError

MAX_BYTES = 8 * 2**20
"""Six hours of seconds are a hundred kilobytes; a much longer response is invalid."""
_SHOWN = 120


def open_session(
    timeout_seconds: float, *, tls: ssl.SSLContext | bool = True, trust_env: bool = False
) -> aiohttp.ClientSession:
    """A session that limits each connection attempt and each read."""
    timeout = aiohttp.ClientTimeout(total=None, connect=timeout_seconds, sock_read=timeout_seconds)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=tls), trust_env=trust_env)


def tls_context(authorities: Path | None) -> ssl.SSLContext | bool:
    if authorities is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(authorities))
    except OSError as error:
        raise DocumentError(f"--prometheus-ca {authorities}: {error.strerror or error}") from error


async def get_json(
    session: aiohttp.ClientSession,
    url: str,
    parameters: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> object:
    body = bytearray()
    try:
        async with session.get(url, params=parameters, headers=headers, allow_redirects=False) as response:
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise ObservationError(f"{url} returned more than {max_bytes // 2**20} MiB")
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = f"{type(error).__name__} {error}".rstrip()
        raise ObservationError(f"{url} cannot be reached: {reason}", "Missing") from error
    if response.status != HTTPStatus.OK:
        shown = body[:_SHOWN].decode(errors="replace")
        raise ObservationError(f"{url} returned {response.status}: {shown}", "Missing")
    try:
        content: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ObservationError(f"{url} returned invalid JSON: {error}") from error
    return content


class Series(BaseModel):
    """A series of a Prometheus response, its samples as (Unix time, value); a value may be infinite or NaN."""

    metric: dict[str, str]
    """Labels."""
    value: tuple[float, float] = (math.nan, math.nan)
    """Of an instant query."""
    values: list[tuple[float, float]] = []
    """Of a range query."""


class _Result(BaseModel):
    result: list[Series]


class _Response(BaseModel):
    data: _Result


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """A Prometheus server, and the file of its bearer token, read for each query."""

    session: aiohttp.ClientSession
    url: str
    token_file: Path | None = None
    max_bytes: int = MAX_BYTES

    async def query(self, expression: str) -> list[Series]:
        return await self._series("query", expression, {})

    async def query_range(self, expression: str, start_seconds: float, end_seconds: float, step: int) -> list[Series]:
        span = {"start": f"{start_seconds:.3f}", "end": f"{end_seconds:.3f}", "step": str(step)}
        return await self._series("query_range", expression, span)

    async def _series(self, kind: str, expression: str, span: Mapping[str, str]) -> list[Series]:
        url, parameters = self.url.rstrip("/"), {"query": expression, **span}
        content = await get_json(self.session, f"{url}/api/v1/{kind}", parameters, self._headers(), self.max_bytes)
        try:
            return _Response.model_validate(content).data.result
        except ValidationError:
            shown = str(content)[:80]
            raise ObservationError(f"{url}: expected a Prometheus response, got {shown!r}") from None

    def _headers(self) -> dict[str, str]:
        if self.token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}
        except OSError as error:
            raise ObservationError(f"Prometheus token {self.token_file}: {error.strerror}", "Missing") from error
