"""Shell: what a process frees is kept for what it needs next.

The C library gives large blocks back to the system as soon as they are free, and gets them anew for the next request or
batch; the page faults of that may take as long as the work itself.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def retain_freed_memory(largest_bytes: int, most_bytes: int) -> bool:
    """Keep it from now on, in this process.

    Args:
        largest_bytes: blocks above are mapped apart, each on its own, and given back at once; 32 MiB at most.
        most_bytes: free memory at the end of a heap that is not given back.

    Returns:
        False where the C library is another than GNU's: all stays as it was.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, largest_bytes) and mallopt(_TRIM_THRESHOLD, most_bytes))
