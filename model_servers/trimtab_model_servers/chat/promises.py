"""Values by name that may be waited for before they are there, for a bounded time; used on one event loop."""

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from trimtab_model_servers.errors import RefusalError

KEEP_SECONDS: Final = 60.0
MOST_NAMES: Final = 4096
Value = TypeVar("Value")


class Promises(Generic[Value]):
    """What is there under a name, or will be.

    Args:
        seconds: how long a name is known, or waited for.
        freed: is told of each value that is let go of.
    """

    def __init__(self, seconds: float = KEEP_SECONDS, freed: Callable[[Value], None] = lambda _: None) -> None:
        self._seconds = seconds
        self._freed = freed
        self._names: dict[str, asyncio.Future[Value]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def known(self, name: str) -> "asyncio.Future[Value] | None":
        """What is promised under a name; None where nobody asked for it or promised it."""
        return self._names.get(name)

    def of(self, name: str) -> "asyncio.Future[Value]":
        """What is promised under a name, from now on.

        Raises:
            RefusalError: 429, too many names are known.
        """
        found = self._names.get(name)
        if found is None:
            if len(self._names) >= MOST_NAMES:
                raise RefusalError(429, f"{MOST_NAMES} names are kept or waited for already")
            loop = asyncio.get_running_loop()
            found = self._names[name] = loop.create_future()
            loop.call_later(self._seconds, self._expire, name, found)
        return found

    async def wait(self, name: str) -> Value:
        """Wait for a name; it stays known. Who gives up leaves no name behind that only he asked for.

        Raises:
            RefusalError: it was refused, or was not there in time.
        """
        promised, found = name in self._names, self.of(name)
        try:
            return found.result() if found.done() else await asyncio.wait_for(asyncio.shield(found), self._seconds)
        except asyncio.CancelledError:
            if not promised and not found.done():
                self.drop(name)
            raise
        except TimeoutError as error:
            raise RefusalError(504, f"nothing was kept as {name!r} within {self._seconds:g} s") from error

    def drop(self, name: str) -> bool:
        """Know a name no longer; False where there is none."""
        found = self._names.pop(name, None)
        if found is None:
            return False
        if found.done() and not found.cancelled() and found.exception() is None:
            self._freed(found.result())
        elif not found.done():
            found.set_exception(RefusalError(410, f"{name!r} was dropped"))
            found.exception()  # seen, even if nobody asks
        return True

    def _expire(self, name: str, future: "asyncio.Future[Value]") -> None:
        if self._names.get(name) is future:
            self.drop(name)
