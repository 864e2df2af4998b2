"""Takes torch and its CUDA libraries out of a hashed requirements file.

Writes the remaining requirements to the second path and prints the pins of torch and torchvision,
which then come from another index. A wheel built for another index has another hash, so these two
pins are the only ones installed without one.
"""

import re
import sys
from pathlib import Path

FROM_THE_OTHER_INDEX = {"torch", "torchvision"}
ONLY_FOR_CUDA = re.compile(r"^(nvidia-.*|cuda-.*|triton)$")


def split(text: str) -> tuple[list[str], str]:
    """The torch pins and the text without torch and without CUDA packages."""
    pins: list[str] = []
    kept: list[str] = []
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", text):
        name = re.split(r"[=<>!\[; ]", block, maxsplit=1)[0].lower()
        if name in FROM_THE_OTHER_INDEX:
            pins.append(block.split(";")[0].split("\\")[0].strip())
        elif not ONLY_FOR_CUDA.match(name):
            kept.append(block)
    return pins, "".join(kept)


def main() -> None:
    """Split the file named first into the file named second."""
    source, target = map(Path, sys.argv[1:3])
    pins, rest = split(source.read_text())
    target.write_text(rest)
    print(*pins)


if __name__ == "__main__":
    main()
