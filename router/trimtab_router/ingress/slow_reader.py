"""Answers are read, or their callers are cut: who reads slowly must not keep what an answer holds."""

import asyncio
from collections.abc import Awaitable

from aiohttp import web

READ_SECONDS = 10.0
"""How long a megabyte of an answer may wait for its caller."""


async def require_timely_read(request: web.BaseRequest, written: Awaitable[None]) -> None:
    """Wait until a piece of an answer has gone out; raises ConnectionResetError, the caller cut, where it does not."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            await written
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the caller does not read its answer") from None
