"""`ImageFetcher`: fetches images that chats refer to by URL, if the settings allow it.

A host is resolved once and connected to at the checked address, bytes are counted as they arrive, and the total time of
all images of a chat is bounded. Redirects are rejected. Names are resolved in threads of their own: a name server that
does not answer delays nothing else.
"""

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.chat_parser import ImageInput
from trimtab_protocol.chat.image_urls import UrlTarget, is_public, parse_target
from trimtab_protocol.errors import InvalidChat
from trimtab_router.admission.memory_budget import Reservation

FETCH_SECONDS = 5.0
CONCURRENT_FETCHES, CONCURRENT_FETCHES_PER_CHAT = 64, 4
CONCURRENT_LOOKUPS = 4
_READ_BYTES = 2**16


class PrivateAddress(OSError):
    """An allowed host resolves to an address that is not public."""


class NameLookups:
    """Name lookups in threads of their own. A lookup beyond the limit fails at once."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(CONCURRENT_LOOKUPS, thread_name_prefix="resolve")
        self._free = threading.BoundedSemaphore(CONCURRENT_LOOKUPS)

    async def look_up(self, host: str, port: int, family: int) -> list[ResolveResult]:
        """Addresses of a host. Raises OSError."""
        if not self._free.acquire(blocking=False):
            raise OSError(f"{host}: {CONCURRENT_LOOKUPS} other name lookups are in progress")
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
        lookup = self._threads.submit(look_up)
        lookup.add_done_callback(lambda _: self._free.release())  # not before the thread is free, even if cancelled
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=int(address[1]), family=kind, proto=proto, flags=flags
            )
            for kind, _, proto, _, address in await asyncio.wrap_future(lookup)
        ]


class Resolver(AbstractResolver):
    """Resolver of one connection, which may reject addresses that are not public."""

    def __init__(self, lookups: NameLookups, *, public_only: bool) -> None:
        self._lookups = lookups
        self._public_only = public_only

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Addresses of a host. Raises PrivateAddress if one is not public, and OSError."""
        addresses = await self._lookups.look_up(host, port, family)
        if self._public_only and not all(is_public(address["host"]) for address in addresses):
            raise PrivateAddress(host)
        return addresses

    async def close(self) -> None:
        """Nothing to close: the threads outlive the connection."""


class ImageFetcher:
    """Fetches images for chats from allowed sources."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._lookups = NameLookups()
        self._slots = asyncio.Semaphore(CONCURRENT_FETCHES)

    async def fetch(self, images: Sequence[ImageInput], reservation: Reservation) -> list[bytes]:
        """Fetch the files of one chat in parallel. Raises InvalidChat, or Refusal if the memory limit is reached.

        The chat counts as being received meanwhile: a slow image server does not look like a slow router.
        """
        targets = [parse_target(image.url, image.field, self._limits) for image in images]
        chat_slots = asyncio.Semaphore(CONCURRENT_FETCHES_PER_CHAT)

        async def fetch_one(target: UrlTarget, field: str) -> bytes:
            async with chat_slots, self._slots:
                return await self._fetch_file(target, field, reservation)

        fetches = []
        try:
            with reservation.receiving():
                async with asyncio.timeout(FETCH_SECONDS), asyncio.TaskGroup() as tasks:
                    for target, image in zip(targets, images, strict=True):
                        fetches.append(tasks.create_task(fetch_one(target, image.field)))
        except TimeoutError as error:
            field = next(image.field for image, fetch in zip(images, fetches, strict=True) if fetch.cancelled())
            raise _failed(field, f"did not arrive within {FETCH_SECONDS:.0f} s") from error
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [fetch.result() for fetch in fetches]

    async def _fetch_file(self, target: UrlTarget, field: str, reservation: Reservation) -> bytes:
        try:
            async with self._session(target) as session, session.get(target.url, allow_redirects=False) as response:
                return await self._read(response, field, reservation)
        except PrivateAddress as error:
            raise _failed(field, "leads to a private address") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, PrivateAddress):
                raise _failed(field, "leads to a private address") from error
            raise _failed(field, "cannot be fetched") from error

    async def _read(self, response: aiohttp.ClientResponse, field: str, reservation: Reservation) -> bytes:
        if 300 <= response.status < 400:
            raise _failed(field, "redirects; redirects are not followed")
        if response.status != 200:
            raise _failed(field, f"returned status {response.status}")
        file = bytearray()
        async for chunk in response.content.iter_chunked(_READ_BYTES):
            reservation.grow(len(chunk))
            file += chunk
            if len(file) > self._limits.max_bytes:
                raise _failed(field, f"has more than {self._limits.max_bytes} bytes")
        return bytes(file)

    def _session(self, target: UrlTarget) -> aiohttp.ClientSession:
        resolver = Resolver(self._lookups, public_only=not target.trusted)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept": "image/png, image/jpeg, image/webp, image/gif", "Accept-Encoding": "identity"},
        )


def _failed(field: str, problem: str) -> InvalidChat:
    return InvalidChat(f"{field} {problem}", param=field, code="invalid_image_url")
