"""Callbacks on an event loop from other threads."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


def call_soon_threadsafe_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    """Schedule a callback from any thread; ignored if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
