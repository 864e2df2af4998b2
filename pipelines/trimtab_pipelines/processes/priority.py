"""Priority of model servers and engines on one machine, below that of what every request passes (decision 72)."""

import os
import time
from pathlib import Path

NICENESS = 5
"""Of their processes and of their sessions."""
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_SECONDS, _AUTOGROUP_ATTEMPTS = 0.1, 50  # Linux takes one niceness in 0.1 s from all users without rights


def lower_priority() -> None:
    """Give the router, the proxy and clients on this machine more of busy cores: every request waits for them."""
    os.nice(NICENESS)
    for _ in range(_AUTOGROUP_ATTEMPTS):
        try:
            _AUTOGROUP.write_text(str(NICENESS), encoding="ascii")
        except BlockingIOError:
            time.sleep(_AUTOGROUP_SECONDS)
        except OSError:  # a kernel without autogroup: the niceness counts between all processes
            return
        else:
            return
