"""Values by name that may be waited for before they are there, for a bounded time; used on one event loop."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from trimtab_model_servers.errors import RefusalError

KEEP_SECONDS: Final = 60.0
MOST_NAMES: Final = 4096
Value = TypeVar("Value")


class KeyedFutures(Generic[Value]):
    """What is there under a name, or will be.

    A name that was dropped is not promised again: who asks for it late, since whoever wanted it has left meanwhile, is
    told so at once, and leaves nothing behind.

    Args:
        seconds: how long a name is known, or waited for.
        freed: is told of each value that is let go of.
    """

    def __init__(self, seconds: float = KEEP_SECONDS, freed: Callable[[Value], None] = lambda _: None) -> None:
        self._seconds = seconds
        self._freed = freed
        self._names: dict[str, asyncio.Future[Value]] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()
        """The latest of them."""

    def __len__(self) -> int:
        return len(self._names)

    def known(self, name: str) -> "asyncio.Future[Value] | None":
        """What is promised under a name; None where nobody asked for it or promised it."""
        return self._names.get(name)

    def dropped(self, name: str) -> bool:
        """Whether it was, of late."""
        return name in self._dropped

    def of(self, name: str) -> "asyncio.Future[Value]":
        """What is promised under a name, from now on.

        Raises:
            RefusalError: 410, it was dropped; 429, too many names are known.
        """
        found = self._names.get(name)
        if found is None:
            if self.dropped(name):
                raise _gone(name)
            if len(self._names) >= MOST_NAMES:
                raise RefusalError(429, f"{MOST_NAMES} names are kept or waited for already")
            loop = asyncio.get_running_loop()
            found = self._names[name] = loop.create_future()
            loop.call_later(self._seconds, self._expire, name, found)
        return found

    async def wait(self, name: str) -> Value:
        """Wait for a name; it stays known. Who gives up leaves no name behind that only he asked for.

        Raises:
            RefusalError: it was refused or dropped, or was not there in time.
        """
        promised, found = name in self._names, self.of(name)
        try:
            return found.result() if found.done() else await asyncio.wait_for(asyncio.shield(found), self._seconds)
        except asyncio.CancelledError:
            if not promised and not found.done():
                self._let_go(name)
            raise
        except TimeoutError as error:
            raise RefusalError(504, f"nothing was kept as {name!r} within {self._seconds:g} s") from error

    def drop(self, name: str) -> bool:
        """Know a name no longer, nor ever again; False where there is none."""
        self._dropped[name] = None
        if len(self._dropped) > MOST_NAMES:
            self._dropped.popitem(last=False)
        return self._let_go(name)

    def _let_go(self, name: str) -> bool:
        found = self._names.pop(name, None)
        if found is None:
            return False
        if found.done() and not found.cancelled() and found.exception() is None:
            self._freed(found.result())
        elif not found.done():
            found.set_exception(_gone(name))
            found.exception()  # seen, even if nobody asks
        return True

    def _expire(self, name: str, future: "asyncio.Future[Value]") -> None:
        if self._names.get(name) is future:
            self.drop(name)


def _gone(name: str) -> RefusalError:
    return RefusalError(410, f"{name!r} was dropped, or given already")
