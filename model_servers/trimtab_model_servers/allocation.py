"""Shell: what a model frees is kept for its next batch.

The C library gives large blocks back to the system as soon as they are free, and gets them anew for every batch: on a
small convolutional network the page faults of that took as long as the computing.
"""

import ctypes
import sys

LARGEST_KEPT_BYTES = 32 * 2**20
"""Blocks above are mapped apart, each on its own, as ever; the C library takes no greater bound."""
MOST_KEPT_BYTES = 256 * 2**20
"""Free memory at the end of a heap that is not given back."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> bool:
    """Keep it from now on, in this process; False where the C library is another than GNU's."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(_TRIM_THRESHOLD, MOST_KEPT_BYTES))
