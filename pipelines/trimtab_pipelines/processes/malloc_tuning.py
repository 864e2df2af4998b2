"""Malloc tuning: freed memory is retained for later requests.

By default glibc returns large blocks to the system as soon as they are freed and maps them again for the next request
or batch; the page faults may take as long as the computation.
"""

import ctypes
import sys
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h


def retain_freed_memory(largest_bytes: int, max_bytes: int) -> bool:
    """Retain freed memory in this process from now on; False if the C library is not glibc.

    Blocks above `largest_bytes`, at most 32 MiB, are mapped individually and returned at once. Up to `max_bytes` of
    free memory at the end of a heap are retained.
    """
    mallopt = _function("mallopt")
    return bool(mallopt and mallopt(_MMAP_THRESHOLD, largest_bytes) and mallopt(_TRIM_THRESHOLD, max_bytes))


def release_freed_memory() -> None:
    """Return freed memory to the system once, such as after many imports."""
    if trim := _function("malloc_trim"):
        trim(0)


def _function(name: str) -> Callable[..., int] | None:
    """A function of the C library; None if that is not glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    return function
