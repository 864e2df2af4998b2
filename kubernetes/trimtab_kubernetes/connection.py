"""`Connection`: requests to one API server, over the official client's transport and credentials.

Retries requests that a busy server defers, and renews expired credentials.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from kubernetes.aio import client, config

from trimtab_kubernetes.errors import ClusterError, Unreachable, error_for
from trimtab_kubernetes.objects import MAX_LEVELS, Object, without_deep_values

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_SECONDS = 10.0
MAX_REQUESTS = 32  # waiting for a response; watches do not count once they have begun
_ANY_NUMBER = 0
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the API server."""

    method: str
    path: str
    query: Mapping[str, str | None] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content_type: str = JSON
    accept: str = JSON
    timeout_seconds: float = REQUEST_TIMEOUT_SECONDS

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class Connection:
    """A connection to the API server; without kubeconfig, as the pod's service account or by KUBECONFIG."""

    def __init__(self, kubeconfig: str | None) -> None:
        self._kubeconfig, self._settings = kubeconfig, client.Configuration()
        self._settings.connection_pool_maxsize = _ANY_NUMBER
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        self._api: Any = None

    async def open(self) -> None:
        """Load credentials; ClusterError if there are none."""
        try:
            await self._read_credentials()
        except (config.ConfigException, OSError) as error:
            raise ClusterError(f"no Kubernetes credentials: {error}; set KUBECONFIG") from error
        self._api = client.ApiClient(self._settings)

    async def close(self) -> None:
        await self._api.close()

    async def call(self, request: Request, may_write: Callable[[], bool]) -> Object:
        """The object in the response to a request; raises ClusterError as `send`."""
        response = await self.send(request, may_write)
        try:
            answer: Object = read_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unreachable(f"{request}: {type(error).__name__} {error}") from error
        finally:
            response.release()
        return answer

    async def send(self, request: Request, may_write: Callable[[], bool] = lambda: True) -> aiohttp.ClientResponse:
        """The response to a request.

        The request is retried once with renewed credentials if they have expired, and after the delay that a busy
        server asks for, up to the request timeout. Raises ClusterError if the server refused the request or did not
        respond.
        """
        give_up_at, is_renewed = time.monotonic() + REQUEST_TIMEOUT_SECONDS, False
        while True:
            if request.method != "GET" and not may_write():
                raise Unreachable(f"{request}: not sent, since this process may not be the leader")
            response = await self._send_once(request)
            if response.status < HTTPStatus.BAD_REQUEST:
                return response
            error = await _error_of(request, response)
            if error.status == HTTPStatus.UNAUTHORIZED and not is_renewed:
                await self._renew_credentials(error)
                is_renewed = True
            elif 0 < error.retry_after_seconds <= give_up_at - time.monotonic():
                log.info("%s; retrying in %g s (Retry-After)", error, error.retry_after_seconds)
                await asyncio.sleep(error.retry_after_seconds)
            else:
                raise error

    async def _send_once(self, request: Request) -> aiohttp.ClientResponse:
        headers = {"Accept": request.accept, "Content-Type": request.content_type}
        query = [(key, value) for key, value in request.query.items() if value is not None]
        options = {"query_params": query, "header_params": headers, "body": request.body}
        try:
            serialized = await self._api.param_serialize(
                request.method, request.path, auth_settings=["BearerToken"], **options
            )
            async with self._slots:
                answer = await self._api.call_api(*serialized, _request_timeout=request.timeout_seconds)
        except (aiohttp.ClientError, TimeoutError, OSError, config.ConfigException) as error:
            raise Unreachable(f"{request}: {type(error).__name__} {error}") from error
        response: aiohttp.ClientResponse = answer.response
        return response

    async def _renew_credentials(self, refused: ClusterError) -> None:
        try:
            await self._read_credentials()
        except (config.ConfigException, OSError) as error:
            raise Unreachable(f"{refused}; no new credentials: {error}", refused.status) from error

    async def _read_credentials(self) -> None:
        if self._kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config(client_configuration=self._settings)
        else:
            path = self._kubeconfig or os.environ.get("KUBECONFIG")  # the client reads it at import only
            await config.load_kube_config(config_file=path, client_configuration=self._settings)


def read_json(text: bytes) -> Any:
    """Read JSON of an API server, which accepts ten times as many levels as orjson reads.

    One object with a field without schema that is so deep would make a list of all objects unreadable; values below
    MAX_LEVELS become null then. Raises ValueError if it is no JSON.
    """
    try:
        return orjson.loads(text)
    except ValueError:
        found = orjson.loads(without_deep_values(text))
        log.warning("an object of the API server is nested too deeply; values below %d levels are ignored", MAX_LEVELS)
        return found


async def _error_of(request: Request, response: aiohttp.ClientResponse) -> ClusterError:
    try:
        body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return Unreachable(f"{request}: {type(error).__name__} {error}")
    return error_for(response.status, f"{request}: {_message(body)}", response.headers.get("Retry-After", ""))


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
