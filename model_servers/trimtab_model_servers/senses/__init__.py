"""Digits heard, seen and typed: items with known truth, and networks that name the digit from any of the three.

``voices``, ``recordings`` and ``items`` make inputs and need no torch; ``early`` and ``late`` are the networks;
``train`` makes their weights anew and measures them.
"""

from typing import Final

MODALITIES: Final = ("audio", "video", "text")
"""In the order in which subsets are written."""

SUBSETS: Final[tuple[tuple[str, ...], ...]] = (
    ("audio",),
    ("video",),
    ("text",),
    ("audio", "video"),
    ("audio", "text"),
    ("video", "text"),
    ("audio", "video", "text"),
)
CLASSES: Final = 10


def subset_name(subset: tuple[str, ...]) -> str:
    """The operating point that reads these modalities: `audio-text`, or `all`."""
    return "all" if len(subset) == len(MODALITIES) else "-".join(subset)
