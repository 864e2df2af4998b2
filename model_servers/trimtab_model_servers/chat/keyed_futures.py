"""`KeyedFutures`: values by name that may be awaited before they exist, for a bounded time; for one event loop."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from trimtab_model_servers.errors import RefusalError

TTL_SECONDS: Final = 60.0
MAX_NAMES: Final = 4096
Value = TypeVar("Value")


class KeyedFutures(Generic[Value]):
    """Futures by name.

    A dropped name is not created again: a request for it fails at once, because its requester has left meanwhile.

    Args:
        ttl_seconds: how long a name exists or is awaited.
        on_drop: called with each value that is dropped.
    """

    def __init__(self, ttl_seconds: float = TTL_SECONDS, on_drop: Callable[[Value], None] = lambda _: None) -> None:
        self._ttl_seconds = ttl_seconds
        self._on_drop = on_drop
        self._futures: dict[str, asyncio.Future[Value]] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()
        """The latest ``MAX_NAMES`` dropped names."""

    def __len__(self) -> int:
        return len(self._futures)

    def get(self, name: str) -> "asyncio.Future[Value] | None":
        return self._futures.get(name)

    def was_dropped(self, name: str) -> bool:
        return name in self._dropped

    def get_or_create(self, name: str) -> "asyncio.Future[Value]":
        """The future of a name.

        Raises:
            RefusalError: 410, it was dropped; 429, too many names exist.
        """
        future = self._futures.get(name)
        if future is None:
            if self.was_dropped(name):
                raise _dropped_error(name)
            if len(self._futures) >= MAX_NAMES:
                raise RefusalError(429, f"{MAX_NAMES} names are stored or awaited already")
            loop = asyncio.get_running_loop()
            future = self._futures[name] = loop.create_future()
            loop.call_later(self._ttl_seconds, self._expire, name, future)
        return future

    async def wait(self, name: str) -> Value:
        """Wait for a value, which stays stored. A cancelled wait removes a name that only it created.

        Raises:
            RefusalError: the value failed, was dropped, or did not arrive in time.
        """
        existed, future = name in self._futures, self.get_or_create(name)
        try:
            if future.done():
                return future.result()
            return await asyncio.wait_for(asyncio.shield(future), self._ttl_seconds)
        except asyncio.CancelledError:
            if not existed and not future.done():
                self._remove(name)
            raise
        except TimeoutError as error:
            raise RefusalError(504, f"nothing was stored as {name!r} within {self._ttl_seconds:g} s") from error

    def drop(self, name: str) -> bool:
        """Remove a name for good; False if it does not exist."""
        self._dropped[name] = None
        if len(self._dropped) > MAX_NAMES:
            self._dropped.popitem(last=False)
        return self._remove(name)

    def _remove(self, name: str) -> bool:
        future = self._futures.pop(name, None)
        if future is None:
            return False
        if future.done() and not future.cancelled() and future.exception() is None:
            self._on_drop(future.result())
        elif not future.done():
            future.set_exception(_dropped_error(name))
            future.exception()  # retrieved, in case nothing awaits it
        return True

    def _expire(self, name: str, future: "asyncio.Future[Value]") -> None:
        if self._futures.get(name) is future:
            self.drop(name)


def _dropped_error(name: str) -> RefusalError:
    return RefusalError(410, f"{name!r} was dropped, or fetched already")
