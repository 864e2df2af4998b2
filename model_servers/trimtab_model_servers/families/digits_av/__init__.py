"""Networks of the digits-av pipeline: they classify a digit from any of audio, video and text.

`early_fusion` and `late_fusion` are the two architectures, `base` has their features and calibration, and `family`
reads and writes weights.
"""

from typing import Final

MODALITIES: Final = ("audio", "video", "text")
"""In the order of subset names."""

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
SAMPLES: Final = 6400
"""Audio samples of an item: 0.8 s at 8 kHz."""
FRAMES: Final = 4
SIDE_PX: Final = 24
CHARACTERS: Final = 6


def subset_name(subset: tuple[str, ...]) -> str:
    """Operating point of a modality subset: `audio-text`, or `all`."""
    return "all" if len(subset) == len(MODALITIES) else "-".join(subset)
