"""`ImageFetcher`: fetches images that chats refer to by URL, if the settings allow it.

A host is resolved once and connected to at the checked address, bytes are counted as they arrive, and the total time is
bounded. Redirects are rejected.
"""

import asyncio
import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.image_urls import UrlTarget, first_private, parse_target
from trimtab_protocol.errors import InvalidChat
from trimtab_router.admission.memory_budget import Reservation

FETCH_SECONDS = 5.0
_READ_BYTES = 2**16


class PrivateAddress(OSError):
    """An allowed host resolves to an address that is not public."""


class _CheckedResolver(AbstractResolver):
    """Resolver that rejects addresses that are not public."""

    def __init__(self) -> None:
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Addresses of a host. Raises PrivateAddress if one is not public."""
        addresses = await self._resolver.resolve(host, port, family)
        private = first_private([address_info["host"] for address_info in addresses])
        if private is not None:
            raise PrivateAddress(host)
        return addresses

    async def close(self) -> None:
        await self._resolver.close()


class ImageFetcher:
    """Fetches images for chats from allowed sources."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits

    async def fetch(self, address: str, field: str, reservation: Reservation) -> bytes:
        """Fetch a file. Its bytes are reserved as they arrive.

        Raises:
            InvalidChat: the URL is not allowed or cannot be fetched, or the file is too large.
            Refusal: the memory limit is reached.
        """
        target = parse_target(address, field, self._limits)
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                self._session(target) as session,
                session.get(target.url, allow_redirects=False) as response,
            ):
                return await self._read(response, field, reservation)
        except TimeoutError as error:
            raise _failed(field, f"did not arrive within {FETCH_SECONDS:.0f} s") from error
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
        resolver = None if target.trusted else _CheckedResolver()
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept": "image/png, image/jpeg, image/webp, image/gif", "Accept-Encoding": "identity"},
        )


def _failed(field: str, problem: str) -> InvalidChat:
    return InvalidChat(f"{field} {problem}", param=field, code="invalid_image_url")
