"""Target of hostile chats: a router with a small model, and an image server that misdirects."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

from benchmarks.hostile.door import Door
from tests.local_run import chat_pipeline, chat_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.spec import InferencePipeline


@asynccontextmanager
async def store() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that leads astray, its address, and what was asked of it that should not be."""
    astray: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/images/away":
                return web.Response(status=302, headers={"Location": "/secret"})
            case "/images/page":
                return web.Response(text="<html></html>" * 100, content_type="text/html")
            case "/images/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                with suppress(ConnectionError):
                    while True:
                        await response.write(bytes(2**16))
                return response
        astray.append(request.path)
        return web.Response(text="secret")

    runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/images/", astray
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(address: str, *, fronted: bool) -> AsyncIterator[Door]:
    """A small model behind a router, which may fetch from one store and one name."""
    plain = chat_pipeline()
    spec = plain.spec.model_dump(by_alias=True, mode="json", exclude_none=True)
    spec["chat"] = {"images": {"stores": [address], "domains": ["localhost"]}}
    pipeline = InferencePipeline.model_validate({"metadata": {"name": plain.name}, "spec": spec})
    with tempfile.TemporaryDirectory(prefix="trimtab-hostile-chats-") as name:
        file = Path(name) / "pipeline.yaml"
        write_json(file, pipeline)
        setup = Setup(file, Path(name) / "run", plan=chat_plan(pipeline), proxy=fronted)
        async with Supervisor(setup) as local:
            await local.ready()
            yield Door(local, {})
