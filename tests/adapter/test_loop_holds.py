"""Control loop with unreadable router responses, and with pipelines outside Auto mode."""

import asyncio

import pytest

from tests.adapter.scenes import FakeRouter
from tests.adapter.test_control_loop import Site, offer, write_documents
from trimtab_adapter.control_loop import LoadSources
from trimtab_adapter.load_sources import RouterSource, open_session
from trimtab_adapter.observation import ObservationError


@pytest.fixture
async def site(tmp_path):
    write_documents(tmp_path)
    async with FakeRouter().serve() as router, open_session(2.0) as client:
        yield Site(tmp_path, router, client)


async def test_an_answer_nested_too_deeply_is_no_observation():
    async with FakeRouter().serve() as router, open_session(2.0) as session:
        router.load = "[" * 200_000
        with pytest.raises(ObservationError, match="returned invalid JSON"):
            await RouterSource(session, router.url).load(0.0)


async def test_whatever_goes_wrong_with_a_look_ends_no_loop(site, caplog):
    class Odd(RouterSource):
        looks = asyncio.Semaphore(0)

        async def load(self, now_seconds, seconds=0):  # noqa: ARG002 - the shared signature
            self.looks.release()
            raise RecursionError("too deep")

    site.write(adaptation={"interval": "1h"})
    good, odd = RouterSource(site.client, site.router.url), Odd(site.client, site.router.url)
    loop, stop = site.loop(sources=LoadSources(good, odd, lambda: 0.01)), asyncio.Event()
    offer(site.router, 5.0)
    await loop.tick(1000.0)
    running = asyncio.create_task(loop.run(stop))
    for _ in range(3):
        await asyncio.wait_for(odd.looks.acquire(), 20.0)
    assert not running.done()
    assert "the newest second cannot be read" in caplog.text
    stop.set()
    await running


async def test_usage_outside_auto_mode_is_recorded_without_routers(site):
    loop, noted = site.loop(), []
    loop.record_usage = lambda pipeline, plan: noted.append((pipeline.spec.mode, plan))
    offer(site.router, 5.0)
    await loop.tick(1000.0)
    assert noted == []
    in_force, site.router.status = loop.current, 503
    for mode in ("Advisory", "Paused"):
        site.write(mode=mode)
        await loop.tick(1100.0)

    assert noted == [("Advisory", in_force), ("Paused", in_force)]
