"""What Envoy asks its router, on a socket of its own: where requests go, and token issuers' public keys."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_router.envoy.api_keys import HashedKey
from trimtab_router.envoy.route_discovery import envoy_routes, route_discovery_response

log = logging.getLogger(__name__)

_JWKS = "/jwks/"
_MAX_JWKS_BYTES = 2**20


class EnvoyControl:
    """The HTTP handler of the control socket. Where keys are asked for, it tells of no routes before it knows some.

    Args:
        settings: what was asked of the door.
        namespace: of the pipeline.
        pipeline: whose door it is.
        longest_seconds: how long a request may take.
    """

    def __init__(self, settings: EdgeSettings, *, namespace: str, pipeline: str, longest_seconds: float) -> None:
        self._settings = settings
        self._door = {"namespace": namespace, "pipeline": pipeline}
        self._longest_seconds = longest_seconds
        self._routes = b""
        if not (settings.keys_file or settings.keys_secret):
            self.use_keys(())

    def use_keys(self, keys: Sequence[HashedKey]) -> None:
        """Let these keys in, and no others, from Envoy's next question on."""
        routes = envoy_routes(self._settings, keys, **self._door, longest_seconds=self._longest_seconds)
        self._routes = route_discovery_response(routes)

    def server(self) -> web.Server:
        """A server for Envoy."""
        return web.Server(self._answer, access_log=None)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/v3/discovery:routes":
            await request.read()
            if not self._routes:
                return web.Response(status=503)  # keys are not read yet; the door keeps those that it knows
            return web.Response(body=self._routes, content_type="application/json")
        number = request.path.removeprefix(_JWKS)
        if request.path.startswith(_JWKS) and number.isdecimal() and int(number) < len(self._settings.jwt):
            return _jwks(Path(self._settings.jwt[int(number)].jwks))
        return web.Response(status=404)


def _jwks(path: Path) -> web.Response:
    """Read a key set anew each time it is asked for; one that is none is told in the log, and Envoy keeps the last."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_JWKS_BYTES)  # more than that is cut, and so no JSON
        json.loads(content)
    except (OSError, ValueError) as error:
        log.warning("token issuer's keys %s: %s; the last good ones stay in force", path, error)
        return web.Response(status=503)
    return web.Response(body=content, content_type="application/json")
