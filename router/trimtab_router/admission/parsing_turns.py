"""`ParsingTurns`: large bodies are parsed one at a time, in at most half of the event loop's time.

Other requests get the other half, however many large bodies arrive at once.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LARGE_BYTES = 64 * 1024

Parsed = TypeVar("Parsed")


class ParsingTurns:
    """Turns of the large bodies of one router."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, size_bytes: int, parse: Callable[[], Parsed]) -> Parsed:
        """Parse a body, at its turn if it is large. The next turn begins after a pause as long as this one."""
        if size_bytes < LARGE_BYTES:
            return parse()
        await self._lock.acquire()
        began = time.perf_counter()
        try:
            return parse()
        finally:
            asyncio.get_running_loop().call_later(time.perf_counter() - began, self._lock.release)
