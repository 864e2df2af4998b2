"""Image fetcher: real servers, redirects, and names that resolve to private addresses."""

import asyncio
import socket
import threading
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from tests.router.chats import a_png
from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.chat_parser import ImageInput
from trimtab_protocol.errors import InvalidChat
from trimtab_router.admission.memory_budget import MemoryBudget
from trimtab_router.ingress import image_fetcher
from trimtab_router.ingress.image_fetcher import ImageFetcher


@asynccontextmanager
async def a_store(answer):
    async with RawTestServer(answer) as server:
        yield str(server.make_url("/images/"))


async def fetch(store, name, budget=None, **bounds):
    fetcher = ImageFetcher(ImageLimits(trusted_prefixes=(store,), **bounds))
    with (budget or MemoryBudget(2**20)).reservation() as reservation:
        return (await fetcher.fetch([ImageInput("image", None, store + name)], reservation))[0]


async def test_a_store_of_our_own_is_fetched_from():
    asked = []

    async def answer(request):
        asked.append(request.path)
        return web.Response(body=a_png())

    async with a_store(answer) as store:
        assert await fetch(store, "a.png") == a_png()
    assert asked == ["/images/a.png"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_to_loopback_are_not_followed(status):
    asked = []

    async def answer(request):
        asked.append(request.path)
        return web.Response(status=status, headers={"Location": "/secret"})

    async with a_store(answer) as store:
        with pytest.raises(InvalidChat, match="redirects are not followed"):
            await fetch(store, "a.png")
    assert asked == ["/images/a.png"]


async def test_a_file_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(image_fetcher, "FETCH_SECONDS", 0.05)

    given_up = asyncio.Event()

    async def answer(request):
        await given_up.wait()
        return web.Response()

    async with a_store(answer) as store:
        with pytest.raises(InvalidChat, match="did not arrive within"):
            await fetch(store, "a.png")
        given_up.set()


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::ffff:169.254.169.254"]])
async def test_a_listed_name_that_leads_somewhere_private_is_refused(addresses, monkeypatch):
    def resolve(*_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    fetcher = ImageFetcher(ImageLimits(allowed_domains=("images.example",)))
    with (
        MemoryBudget(2**20).reservation() as reservation,
        pytest.raises(InvalidChat, match="leads to a private address"),
    ):
        await fetcher.fetch([ImageInput("image", None, "http://images.example/a.png")], reservation)


async def test_name_server_that_hangs_delays_only_its_chats(monkeypatch):
    monkeypatch.setattr(image_fetcher, "FETCH_SECONDS", 0.05)
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answers.wait(60) and [])
    fetcher = ImageFetcher(ImageLimits(allowed_domains=("images.example",)))
    images = [ImageInput("image", None, f"http://images.example/{number}.png") for number in range(5)]
    budget = MemoryBudget(2**20)

    with budget.reservation() as reservation:
        for problem in ("did not arrive within", "cannot be fetched"):  # then every lookup thread is taken
            with pytest.raises(InvalidChat, match=problem):
                await fetcher.fetch(images[:4], reservation)
        assert await asyncio.to_thread(lambda: "other threads are free") == "other threads are free"
        assert budget.active_requests == 1
    answers.set()


async def test_images_of_a_chat_are_fetched_in_parallel():
    asked, together = [], asyncio.Event()

    async def answer(request):
        asked.append(request.path)
        if len(asked) == 3:
            together.set()
        await together.wait()
        return web.Response(body=request.path.encode())

    async with a_store(answer) as store:
        fetcher = ImageFetcher(ImageLimits(trusted_prefixes=(store,)))
        with MemoryBudget(2**20).reservation() as reservation:
            files = await fetcher.fetch([ImageInput("image", None, store + name) for name in "abc"], reservation)
    assert files == [b"/images/a", b"/images/b", b"/images/c"]
