"""Shell: fetches the images that chats show by their addresses, as far as that is allowed.

A host is looked up once and connected to where it was found, its bytes are counted as they come, and the whole has a
bound in time; redirects are refused.
"""

import asyncio
import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.errors import InvalidChat
from trimtab_protocol.chat.image_urls import UrlTarget, first_refused, target_of
from trimtab_router.admission.memory_budget import Reservation

FETCH_SECONDS = 5.0
_READ_BYTES = 2**16


class PrivateAddress(OSError):
    """A host that may be fetched from is found at an address that is none of the internet's."""


class _CheckedResolver(AbstractResolver):
    """Looks hosts up, and finds only those of the internet."""

    def __init__(self) -> None:
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a host; raises PrivateAddress where one is none of the internet's."""
        found = await self._resolver.resolve(host, port, family)
        private = first_refused([each["host"] for each in found])
        if private is not None:
            raise PrivateAddress(host)
        return found

    async def close(self) -> None:
        """Hold nothing any more."""
        await self._resolver.close()


class ImageFetcher:
    """Fetches images for chats.

    Args:
        bounds: from where, and how large.
    """

    def __init__(self, bounds: ImageLimits) -> None:
        self._bounds = bounds

    async def fetch(self, address: str, field: str, reservation: Reservation) -> bytes:
        """The file at an address, its bytes reserved as they come.

        Raises:
            InvalidChat: it may not be fetched, cannot be, or is too large.
            Refusal: there is no room for it.
        """
        target = target_of(address, field, self._bounds)
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                self._session(target) as session,
                session.get(target.url, allow_redirects=False) as response,
            ):
                return await self._read(response, field, reservation)
        except TimeoutError as error:
            raise _failed(field, f"did not come within {FETCH_SECONDS:.0f} s") from error
        except PrivateAddress as error:
            raise _failed(field, "leads to a private address") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, PrivateAddress):
                raise _failed(field, "leads to a private address") from error
            raise _failed(field, "cannot be fetched") from error

    async def _read(self, response: aiohttp.ClientResponse, field: str, reservation: Reservation) -> bytes:
        if 300 <= response.status < 400:
            raise _failed(field, "leads elsewhere; redirects are not followed")
        if response.status != 200:
            raise _failed(field, f"was answered with status {response.status}")
        file = bytearray()
        async for piece in response.content.iter_chunked(_READ_BYTES):
            reservation.grow(len(piece))
            file += piece
            if len(file) > self._bounds.max_bytes:
                raise _failed(field, f"has more than {self._bounds.max_bytes} bytes")
        return bytes(file)

    def _session(self, target: UrlTarget) -> aiohttp.ClientSession:
        resolver = None if target.own else _CheckedResolver()
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept": "image/png, image/jpeg, image/webp, image/gif", "Accept-Encoding": "identity"},
        )


def _failed(field: str, why: str) -> InvalidChat:
    return InvalidChat(f"{field} {why}", param=field, code="invalid_image_url")
