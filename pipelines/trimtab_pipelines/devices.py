"""CUDA devices of this machine, found without CUDA."""

import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """Devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    found = [*root.glob("proc/driver/nvidia/gpus/*")] or [*root.glob("dev/nvidia[0-9]*"), *root.glob("dev/dxg")]
    listed = environment.get(DEVICES_VARIABLE, ",".join(map(str, range(len(found))))).split(",") if found else []
    return tuple(takewhile(lambda device: device and not device.startswith("-"), map(str.strip, listed)))
