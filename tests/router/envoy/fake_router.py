"""A proxy with a fake router, which records requests and returns given responses."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from tests.router.fakes import a_pipeline, an_envoy
from trimtab.local.envoy_process import EnvoyPorts, make_sockets
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_router.envoy.api_keys import HashedKey
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.ingress.listeners import EnvoyControl, Listener

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def a_fake_router(
    handler: Handler,
    settings: EdgeSettings | None = None,
    keys: Sequence[HashedKey] = (),
    sockets: Sockets | None = None,
) -> AsyncIterator[EnvoyPorts]:
    settings, sockets = settings or EdgeSettings(), sockets or make_sockets()
    control = EnvoyControl(settings, namespace="default", pipeline="sample", max_seconds=60)
    control.use_keys(keys)
    listening = [Listener(web.Server(handler)), Listener(control.server())]
    try:
        await listening[0].on_socket(sockets.requests)
        await listening[1].on_socket(sockets.control)
        async with an_envoy(a_pipeline(1), sockets, settings) as ports:
            yield ports
    finally:
        for server in listening:
            await server.close()
        shutil.rmtree(sockets.folder)
