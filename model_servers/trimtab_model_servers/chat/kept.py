"""Embeddings that wait under a name for who pulls them: given once, or freed when asked, cancelled or too old."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from trimtab_model_servers.errors import RefusalError

KEEP_SECONDS: Final = 60.0
MOST_NAMES: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An image's embeddings, and what it shows."""

    rows: Tensor
    digest: str


class Kept:
    """What is kept by name; a name may be asked for before it is there. Used on one event loop.

    Args:
        most_bytes: more is not kept at once.
        seconds: how long a name is kept, or waited for.
    """

    def __init__(self, most_bytes: int, seconds: float = KEEP_SECONDS) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._names: dict[str, asyncio.Future[Held]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def expect(self, name: str) -> None:
        """Promise that a name will be there, or refused."""
        self._future(name)

    def put(self, name: str, held: Held) -> None:
        """Keep embeddings under a name that is expected; nobody waits for one that was dropped meanwhile.

        Raises:
            RefusalError: 429, too much is kept.
        """
        found = self._names.get(name)
        if found is None or found.done():
            return
        if self.bytes + held.rows.nbytes > self._most_bytes:
            refusal = RefusalError(429, f"{self.bytes:,} bytes of embeddings wait to be pulled already; pull them")
            self.refuse(name, refusal)
            raise refusal
        self.bytes += held.rows.nbytes
        found.set_result(held)

    def refuse(self, name: str, refusal: RefusalError) -> None:
        """Tell who waits for a name that it will not come."""
        found = self._future(name)
        if not found.done():
            found.set_exception(refusal)
            found.exception()  # seen, even if nobody asks

    async def give(self, names: Sequence[str]) -> list[Held]:
        """Wait for names, give what is under them, and keep it no longer.

        Raises:
            RefusalError: one was refused, or was not there in time; the others are kept on.
        """
        held = [await self._wait(name) for name in names]
        for name in names:
            self.drop(name)
        return held

    async def _wait(self, name: str) -> Held:
        promised, found = name in self._names, self._future(name)
        try:
            return found.result() if found.done() else await asyncio.wait_for(asyncio.shield(found), self._seconds)
        except asyncio.CancelledError:
            if not promised and not found.done():
                self.drop(name)
            raise
        except TimeoutError as error:
            raise RefusalError(504, f"nothing was kept as {name!r} within {self._seconds:g} s") from error

    def drop(self, name: str) -> bool:
        """Keep a name no longer; False where there is none."""
        found = self._names.pop(name, None)
        if found is None:
            return False
        if found.done() and not found.cancelled() and found.exception() is None:
            self.bytes -= found.result().rows.nbytes
        elif not found.done():
            found.set_exception(RefusalError(410, f"{name!r} was dropped"))
            found.exception()
        return True

    def _future(self, name: str) -> "asyncio.Future[Held]":
        found = self._names.get(name)
        if found is None:
            if len(self._names) >= MOST_NAMES:
                raise RefusalError(429, f"{MOST_NAMES} names are kept or waited for already")
            loop = asyncio.get_running_loop()
            found = self._names[name] = loop.create_future()
            loop.call_later(self._seconds, self._expire, name, found)
        return found

    def _expire(self, name: str, future: "asyncio.Future[Held]") -> None:
        if self._names.get(name) is future:
            self.drop(name)
