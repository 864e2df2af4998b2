"""Telling an event loop something from another thread."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


def call_soon_threadsafe_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    """Have a loop call back, from any thread; a loop that was closed meanwhile has nobody left to be told."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
