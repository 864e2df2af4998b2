"""`EnvoyControl`: serves routes and JWT issuers' keys to Envoy, on a socket of its own."""

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
    """HTTP handler of the control socket: no routes before the keys are read; requests end within `max_seconds`."""

    def __init__(self, settings: EdgeSettings, *, namespace: str, pipeline: str, max_seconds: float) -> None:
        self.settings = settings
        self._labels = {"namespace": namespace, "pipeline": pipeline}
        self._max_seconds = max_seconds
        self.routes = b""
        if not (settings.keys_file or settings.keys_secret):
            self.use_keys(())

    def use_keys(self, keys: Sequence[HashedKey]) -> None:
        """Accept these keys, and no others, from Envoy's next poll on."""
        routes = envoy_routes(self.settings, keys, **self._labels, max_seconds=self._max_seconds)
        self.routes = route_discovery_response(routes)

    def server(self) -> web.Server:
        return web.Server(self._respond, access_log=None)

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/v3/discovery:routes":
            await request.read()
            if not self.routes:
                return web.Response(status=503)  # keys are not read yet; Envoy keeps its current routes
            return web.Response(body=self.routes, content_type="application/json")
        number = request.path.removeprefix(_JWKS)
        if request.path.startswith(_JWKS) and number.isdecimal() and int(number) < len(self.settings.jwt):
            return _jwks_response(Path(self.settings.jwt[int(number)].jwks))
        return web.Response(status=404)


def _jwks_response(path: Path) -> web.Response:
    """Read a key set for each request. An invalid one is logged, and Envoy keeps the previous one."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_JWKS_BYTES)  # a longer file is truncated, and so invalid JSON
        json.loads(content)
    except (OSError, ValueError) as error:
        log.warning("token issuer's keys %s: %s; the last valid keys stay in use", path, error)
        return web.Response(status=503)
    return web.Response(body=content, content_type="application/json")
